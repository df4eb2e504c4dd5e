"""BatchNormalization and Dropout that cannot train as they are to: said, not passed over."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import models
from onnxtrain import CheckpointState, Module, Trainer, generate_artifacts, make_batch_dynamic
from onnxtrain.errors import GraphBuildError, InputError
from trainer import problems


def norm_model(batch: int | str) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    helper = onnx.helper
    values = {
        "w": rng.standard_normal((4, 8)).astype(np.float32),
        **{
            name: np.full(8, fill, np.float32) for name, fill in {"s": 1, "b": 0, "mean": 0, "var": 1}.items()
        },
        "v": rng.standard_normal((8, 2)).astype(np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("BatchNormalization", ["h", "s", "b", "mean", "var"], ["n"]),
        helper.make_node("MatMul", ["n", "v"], ["y"]),
    ]
    return models.make_model(nodes, {"x": [batch, 4]}, {"y": [batch, 2]}, values)


def test_statistics_of_one_sample_are_refused(tmp_path: Path) -> None:
    model = norm_model(1)
    with pytest.raises(
        GraphBuildError, match=r"exported for a batch of 1. .*onnxtrain.make_batch_dynamic\(model\)"
    ):
        Trainer(model, "cross_entropy", batch_norm="training", directory=tmp_path / "run")
    with pytest.raises(GraphBuildError, match="exported for a batch of 1"):
        generate_artifacts(
            model, loss="cross_entropy", batch_norm="training", artifact_directory=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()
    Trainer(model, "cross_entropy", batch_norm="inference")


def test_made_dynamic_it_normalises_by_the_batch() -> None:
    """One step of gradient descent beside PyTorch's."""
    x = np.random.default_rng(1).standard_normal((16, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    model = norm_model(1)
    start = {t.name: torch.tensor(onnx.numpy_helper.to_array(t).copy()) for t in model.graph.initializer}
    trainer = Trainer(make_batch_dynamic(model), "cross_entropy", "sgd", 0.1, batch_norm="training")
    trainer.fit(x, y, batch_size=16, shuffle=False, verbose=False)
    norm = torch.nn.BatchNorm1d(8)
    w, v = start["w"].requires_grad_(), start["v"].requires_grad_()
    torch.nn.functional.cross_entropy(norm(torch.tensor(x) @ w) @ v, torch.tensor(y)).backward()
    for name, value in (("w", w), ("v", v), ("s", norm.weight), ("b", norm.bias)):
        assert value.grad is not None
        expected = (value - 0.1 * value.grad).detach().numpy()
        np.testing.assert_allclose(trainer.parameters[name].data, expected, rtol=1e-4, atol=1e-6)


def test_training_sample_by_sample_is_told(caplog: pytest.LogCaptureFixture) -> None:
    problem = problems.line(samples=6, batch=1)
    trainer = Trainer(problem.model, "mse")
    trainer.fit(problem.x, problem.y, verbose=False)
    assert "exported for one sample at a time: each step of the optimizer sees a single one" in caplog.text
    assert "make_batch_dynamic" in caplog.text
    caplog.clear()
    trainer.evaluate(problem.x, problem.y)
    assert caplog.text == ""


def test_the_device_is_told_of_a_fixed_batch(tmp_path: Path) -> None:
    generate_artifacts(
        norm_model(2), loss="cross_entropy", batch_norm="inference", artifact_directory=tmp_path
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    with pytest.raises(
        InputError, match=r"axis 0 must be 2. If this is the batch: .*make_batch_dynamic\(model\)"
    ):
        module(np.ones((3, 4), np.float32), np.zeros(3, np.int64))
    with pytest.raises(InputError, match=r"axis 1 must be 4\.$"):
        module(np.ones((2, 5), np.float32), np.zeros(2, np.int64))


def test_nothing_to_switch_is_an_error() -> None:
    problem = problems.line()
    with pytest.raises(GraphBuildError, match="batch_norm='training' has nothing to switch"):
        Trainer(problem.model, "mse", batch_norm="training")
    Trainer(problem.model, "mse", batch_norm="inference")


def test_dropout_alone_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        net (float[n, 2] x) => (float[n, 1] y) <float[2, 1] w = {1., 2.}> { d = Dropout(x) y = MatMul(d, w) }"""
    )
    with caplog.at_level(logging.WARNING):
        Trainer(model, "mse", batch_norm="training")
    assert "the model has no BatchNormalization node" in caplog.text


def test_a_single_name_may_stand_alone() -> None:
    """`frozen_params="w1"` is one parameter, not the two `w` and `1`."""
    problem = problems.classes()
    for options, moving in (({"frozen_params": "w1"}, {"b1", "w2", "b2"}), ({"requires_grad": "w1"}, {"w1"})):
        trainer = Trainer(problem.model, problem.loss, loss_input_names="logits", **options)
        assert {name for name, p in trainer.parameters if p.requires_grad} == moving
