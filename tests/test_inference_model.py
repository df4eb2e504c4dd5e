"""`inference_model.onnx`: predictions without labels, on a host that has nothing but a stock runtime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import safetensors.numpy
import torch
from torch import nn

import models
from onnxtrain import CheckpointState, Module, Trainer, generate_artifacts
from onnxtrain.errors import ModelLoadError, TrainingStateError
from trainer import problems


def host_predicts(folder: Path, feeds: dict[str, np.ndarray], prefix: str = "") -> dict[str, np.ndarray]:
    """As a host in C does it: the manifest, the model, the tensors of the checkpoint by their names."""
    manifest = json.loads((folder / f"{prefix}manifest.json").read_text())
    tensors = safetensors.numpy.load_file(folder / manifest["files"]["checkpoint"])
    session = ort.InferenceSession(folder / manifest["files"]["inference_model"])
    entry = manifest["inference"]
    held = [value.name for value in session.get_inputs() if value.name not in entry["inputs"]]
    expected = [spec["name"] for spec in (*manifest["parameters"], *manifest["statistics"])]
    assert held == expected, "the buffers of the eval model, in its order"
    evaluation = ort.InferenceSession(folder / manifest["files"]["eval_model"])
    assert [v.name for v in evaluation.get_inputs()][-len(held) :] == held
    buffers = {name: tensors.get(f"parameter/{name}", tensors.get(f"statistic/{name}")) for name in held}
    assert set(entry["inputs"]) == set(feeds)
    return dict(zip(entry["outputs"], session.run(entry["outputs"], {**feeds, **buffers}), strict=True))


class Net(nn.Module):
    """BatchNorm and Dropout, which are not to train, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten()
        )
        self.head = nn.Linear(4 * 16, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.body(x)
        return self.head(features), features


@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_its_outputs_are_those_of_torch_and_of_the_exported_model(tmp_path: Path) -> None:
    """Before and after some steps, in which the statistics of BatchNorm move."""
    torch.manual_seed(0)
    net = Net()
    torch.onnx.export(
        net, (torch.randn(2, 2, 6, 6),), str(tmp_path / "net.onnx"), dynamo=False, do_constant_folding=False,
        training=torch.onnx.TrainingMode.TRAINING, input_names=["x"], output_names=["logits", "features"],
        dynamic_axes={"x": {0: "batch"}, "logits": {0: "batch"}, "features": {0: "batch"}},
    )  # fmt: skip
    net.eval()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20, 2, 6, 6)).astype(np.float32)
    path = tmp_path / "net.onnx"
    trainer = Trainer(
        path, "cross_entropy", learning_rate=0.01, loss_input_names="logits", directory=tmp_path / "run"
    )
    trainer.save(tmp_path / "run")
    for trained in (False, True):
        if trained:
            trainer.fit(x, rng.integers(0, 3, 20), epochs=2, verbose=False)
            state = {
                name: torch.tensor(np.array(p.data))
                for group in (trainer.parameters, trainer.state.statistics)
                for name, p in group
            }
            net.load_state_dict(state, strict=False)
            assert len(state) == len([n for n in net.state_dict() if "num_batches" not in n])
        got = host_predicts(tmp_path / "run", {"x": x})
        with torch.no_grad():
            expected = net(torch.tensor(x))
        trainer.export(tmp_path / "exported.onnx")
        alone = ort.InferenceSession(tmp_path / "exported.onnx").run(None, {"x": x})
        predicted = trainer.predict(x)
        assert list(got) == list(predicted) == ["logits", "features"]
        for (name, value), reference, other in zip(got.items(), expected, alone, strict=True):
            np.testing.assert_allclose(value, reference, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(predicted[name], value)


def test_a_loss_inside_the_model_is_not_in_it(tmp_path: Path) -> None:
    """Outputs (loss, logits) of a model that takes its labels: neither labels nor loss are needed to predict."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        net (float[n, 2] x, int64[n] labels) => (float loss, float[n, 3] logits)
        <float[2, 3] w = {1., 2., 3., 4., 5., 6.}, float[3] unread = {1., 1., 1.}>
        { logits = MatMul(x, w) loss = SoftmaxCrossEntropyLoss(logits, labels) }"""
    )
    generate_artifacts(
        model, requires_grad=["w"], frozen_params=["unread"], artifact_directory=tmp_path, prefix="p_"
    )
    x = np.ones((4, 2), np.float32)
    got = host_predicts(tmp_path, {"x": x}, "p_")
    np.testing.assert_allclose(got["logits"], x @ np.arange(1, 7).reshape(2, 3), rtol=1e-6)


def test_outputs_that_are_inputs_or_parameters(tmp_path: Path) -> None:
    model = models.mlp()
    for name, dims in (("x", ["batch", 4]), ("w1", [4, 8])):
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, 1, dims))
    generate_artifacts(model, loss="cross_entropy", loss_input_names=["logits"], artifact_directory=tmp_path)
    x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    got = host_predicts(tmp_path, {"x": x})
    plain = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    for value, expected in zip(got.values(), plain, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


# Outputs of a file beside `h`, which the loss reads, and the nodes that write them.
OUTPUTS = {
    "an Identity": ("float[n, 4] y", "y = Identity(h)"),
    "two Identities": ("float[n, 4] y", "i = Identity(h) y = Identity(i)"),
    "a constant If": (
        "float[n, 4] y",
        """c = Constant<value = bool {1}>() y = If(c) <then_branch = t () => (float[n, 4] r) { r = Relu(h) },
        else_branch = e () => (float[n, 4] s) { s = Tanh(h) }>""",
    ),
    "ConcatFromSequence": (
        "float[n, 8] y",
        "q = SequenceConstruct(h, h) y = ConcatFromSequence<axis = 1>(q)",
    ),
    "SequenceAt": ("float[n, 2] y", "q = SplitToSequence<axis = 1>(h, sizes) y = SequenceAt(q, first)"),
    "SequenceLength": ("int64 y", "q = SequenceConstruct(h, h) y = SequenceLength(q)"),
    "an Identity of the input": ("float[n, 4] y", "y = Identity(x)"),
    "an Identity of a weight": ("float[4, 4] y", "y = Identity(w)"),
    "the input itself": ("float[n, 4] x", ""),
    "a trained weight": ("float[4, 4] w", ""),
    "an initializer": ("float[2] anchors", ""),
    "an initializer of integers": ("int64[2] sizes", ""),
    "a constant": ("int64[2] y", "y = Constant<value_ints = [7, 8]>()"),
    "an Identity of a constant": ("int64[2] y", "c = Constant<value_ints = [7, 8]>() y = Identity(c)"),
    "an Identity of integers": ("int64[2] y", "y = Identity(sizes)"),
}


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", OUTPUTS)
def test_every_output_of_a_file_can_be_exported(kind: str, first: bool, tmp_path: Path) -> None:
    """By the device, where the loss reads the output or is told of it, and by `Trainer`."""
    output, nodes = OUTPUTS[kind]
    own = output.split()[-1]
    outputs = f"{output}, float[n, 4] z" if first else f"float[n, 4] z, {output}"
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        net (float[n, 4] x) => ({outputs})
        <float[4, 4] w = {{1, 0, 0, 0.5, 0, 1, 0, 0, 0, 0, 1, 0, 0.3, 0, 0, 1}}, int64[2] sizes = {{2, 2}},
        int64 first = {{0}}, float[2] anchors = {{7, 8}}> {{ h = MatMul(x, w) z = Sin(h) {nodes} }}""")
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    names = [value.name for value in model.graph.output]
    given = dict(
        zip(names, ort.InferenceSession(model.SerializeToString()).run(names, {"x": x}), strict=True)
    )

    read = (
        own
        if own == "y" and "Identity(x)" not in nodes and "(w)" not in nodes and "int64" not in output
        else "z"
    )
    for further in ([], names):
        folder = tmp_path / f"artifacts{len(further)}"
        generate_artifacts(
            model,
            loss="mse",
            loss_input_names=[read],
            additional_output_names=further,
            artifact_directory=folder,
        )
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
        # Of the values that the loss does not read the eval model has those that it is told of.
        exported = names if further else [own] if own == read else [own, "z"]
        module.export_model_for_inferencing(folder / "out.onnx", exported)
        onnx.checker.check_model(folder / "out.onnx", full_check=True)
        results = ort.InferenceSession(folder / "out.onnx").run(exported, {"x": x})
        for name, value in zip(exported, results, strict=True):
            np.testing.assert_allclose(value, given[name], rtol=1e-6, err_msg=name)

    trainer = Trainer(model, "mse", loss_input_names=read)
    trainer.export(tmp_path / "out.onnx")
    session = ort.InferenceSession(tmp_path / "out.onnx")
    assert [value.name for value in session.get_outputs()] == names
    for value, name in zip(session.run(None, {"x": x}), names, strict=True):
        np.testing.assert_allclose(value, given[name], rtol=1e-6, err_msg=name)


def test_without_outputs_but_the_loss_there_is_none(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> net (float[n, 2] x) => (float loss)
        <float[2, 1] w = {1., 2.}> { y = MatMul(x, w) m = Mul(y, y) loss = ReduceSum<keepdims = 0>(m) }"""
    )
    generate_artifacts(model, artifact_directory=tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["inference"] is None
    assert "inference_model" not in manifest["files"]
    assert not (tmp_path / "inference_model.onnx").exists()
    with pytest.raises(TrainingStateError, match="nothing to predict"):
        Trainer(model, None).predict(np.ones((2, 2), np.float32))


def test_artifacts_that_return_the_loss_alone_predict(tmp_path: Path) -> None:
    """`generate_artifacts` without additional outputs: the eval model has no prediction, the inference model has."""
    generate_artifacts(models.mlp(), loss="cross_entropy", optimizer="adamw", artifact_directory=tmp_path)
    x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    trainer = Trainer.resume(tmp_path)
    assert trainer.outputs == ["logits"]
    expected = ort.InferenceSession(models.mlp().SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_allclose(trainer.predict(x), expected, rtol=1e-5, atol=1e-6)
    trainer.export(tmp_path / "out.onnx")
    got = ort.InferenceSession(tmp_path / "out.onnx").run(None, {"x": x})[0]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("manifest", [True, False])
def test_artifacts_without_the_file_still_work(tmp_path: Path, manifest: bool) -> None:
    """As they were written before there was one; a manifest beside the models or not."""
    problem = problems.classes()
    trainer = Trainer(problem.model, problem.loss, directory=tmp_path / "run", loss_input_names="logits")
    trainer.save(tmp_path / "run")
    expected = trainer.predict(problem.x)
    run = tmp_path / "run"
    (run / "inference_model.onnx").unlink()

    def older(document: dict[str, Any]) -> dict[str, Any]:
        document.pop("inference")
        document["files"].pop("inference_model")
        return document

    for name in ("training_model.onnx", "eval_model.onnx"):
        model = onnx.load(run / name)
        for entry in model.metadata_props:
            if entry.key == "onnxtrain.manifest":
                entry.value = json.dumps(older(json.loads(entry.value)))
        onnx.save(model, run / name)
    document = older(json.loads((run / "manifest.json").read_text()))
    (run / "manifest.json").unlink()
    if manifest:
        (run / "manifest.json").write_text(json.dumps(document))
    old = Trainer.resume(run)
    got = old.predict(problem.x)
    for name in expected if isinstance(expected, dict) else []:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-6)
    if not isinstance(expected, dict):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    old.export(tmp_path / "out.onnx")
    old.fit(problem.x, problem.y, verbose=False)
    old.save(tmp_path / "copy")
    assert not (tmp_path / "copy" / "inference_model.onnx").exists()
    state = CheckpointState.load_checkpoint(run / "checkpoint")
    Module(run / "training_model.onnx", state, run / "eval_model.onnx")


def test_one_of_another_run_is_refused(tmp_path: Path) -> None:
    problem = problems.line()
    trainer = Trainer(problem.model, "mse", directory=tmp_path / "run")
    trainer.save(tmp_path / "run")
    Trainer(models.mlp(), "cross_entropy", directory=tmp_path / "other")
    other = (tmp_path / "other" / "inference_model.onnx").read_bytes()
    (tmp_path / "run" / "inference_model.onnx").write_bytes(other)
    with pytest.raises(ModelLoadError, match=r"inference model .* its inputs and outputs do not match"):
        Trainer.resume(tmp_path / "run").predict(problem.x)
