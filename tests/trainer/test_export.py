"""Prediction and export: an ordinary model for a plain session."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxtrain import Trainer, generate_artifacts
from onnxtrain.errors import CheckpointError, InputError, TrainingStateError
from trainer import problems


def test_untrained_prediction_is_the_model_s() -> None:
    problem = problems.classes()
    session = ort.InferenceSession(problem.model.SerializeToString())
    expected = session.run(None, {"x": problem.x})[0]
    np.testing.assert_allclose(Trainer(problem.model, problem.loss).predict(problem.x), expected, rtol=1e-6)


@pytest.mark.parametrize("make", [problems.classes, problems.images], ids=["mlp", "batch-norm"])
def test_export_has_the_model_s_inputs_and_outputs(make: object, tmp_path: Path) -> None:
    problem = make()  # type: ignore[operator]
    trainer = Trainer(problem.model, problem.loss, learning_rate=1e-2)
    trainer.fit(problem.x, problem.y, epochs=2, verbose=False)
    path = tmp_path / "trained.onnx"
    trainer.export(path)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)

    def signature(values: object) -> list[tuple]:
        return [(v.name, [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]) for v in values]

    assert signature(model.graph.input) == signature(problem.model.graph.input)
    assert signature(model.graph.output) == signature(problem.model.graph.output)
    assert not model.functions
    training = [a.i for n in model.graph.node for a in n.attribute if a.name == "training_mode"]
    assert not any(training)
    session = ort.InferenceSession(path)
    # Not bit-equal: with constant statistics onnxruntime folds the normalisation into the convolution.
    logits = session.run(None, {"x": problem.x})[0]
    np.testing.assert_allclose(logits, trainer.predict(problem.x), rtol=1e-5, atol=1e-6)
    one = session.run(None, {"x": problem.x[:1]})[0]
    np.testing.assert_allclose(one, trainer.predict(problem.x)[:1], rtol=1e-5, atol=1e-6)


def test_several_outputs_and_chosen_ones(tmp_path: Path) -> None:
    trainer = Trainer(problems.two_inputs(), "mse", loss_input_names=["sum"], frozen_params=["v"])
    trainer.export(tmp_path / "all.onnx")
    trainer.export(tmp_path / "one.onnx", outputs=["product"])
    assert [o.name for o in ort.InferenceSession(tmp_path / "all.onnx").get_outputs()] == ["sum", "product"]
    one = ort.InferenceSession(tmp_path / "one.onnx")
    assert [o.name for o in one.get_outputs()] == ["product"]
    assert [i.name for i in one.get_inputs()] == ["left"]
    with pytest.raises(InputError, match="unknown names"):
        trainer.export(tmp_path / "none.onnx", outputs=["nothing"])


def test_prediction_follows_training_and_loading(tmp_path: Path) -> None:
    problem = problems.classes()
    trainer = Trainer(problem.model, problem.loss, learning_rate=0.1)
    before = trainer.predict(problem.x)
    trainer.save_parameters(tmp_path / "parameters")
    trainer.fit(problem.x, problem.y, verbose=False)
    assert not np.allclose(trainer.predict(problem.x), before)
    trainer.load_parameters(tmp_path / "parameters")
    np.testing.assert_array_equal(trainer.predict(problem.x), before)


def test_parameters_of_another_model(tmp_path: Path) -> None:
    Trainer(problems.line().model, "mse").save_parameters(tmp_path / "line")
    Trainer(problems.line(features=5).model, "mse").save_parameters(tmp_path / "wide")
    trainer = Trainer(problems.classes().model, "cross_entropy")
    with pytest.raises(CheckpointError, match="belongs to another model"):
        trainer.load_parameters(tmp_path / "line")
    trainer = Trainer(problems.line().model, "mse")
    with pytest.raises(CheckpointError, match="expected float32 of shape"):
        trainer.load_parameters(tmp_path / "wide")


def test_output_without_samples() -> None:
    from onnx import helper

    import models

    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("ReduceSum", ["y"], ["total"], keepdims=0),
    ]
    model = models.make_model(
        nodes, {"x": ["n", 2]}, {"y": ["n", 1], "total": []}, {"w": np.ones((2, 1), np.float32)}
    )
    trainer = Trainer(model, "mse", loss_input_names=["y"])
    with pytest.raises(InputError, match=r"the output 'total' of shape .* has no value per sample"):
        trainer.predict(np.ones((4, 2)))


def test_artifacts_without_outputs(tmp_path: Path) -> None:
    problem = problems.classes()
    generate_artifacts(problem.model, loss=problem.loss, optimizer="sgd", artifact_directory=tmp_path)
    (tmp_path / "inference_model.onnx").unlink()  # as artifacts were before there was one
    trainer = Trainer.resume(tmp_path)
    assert set(trainer.fit(problem.x, problem.y, verbose=False).keys()) == {"epoch", "loss", "learning_rate"}
    with pytest.raises(TrainingStateError, match="return only the loss"):
        trainer.predict(problem.x)
    with pytest.raises(TrainingStateError, match="return only the loss"):
        trainer.export(tmp_path / "x.onnx")
