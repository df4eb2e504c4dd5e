"""The layers through both exporters of PyTorch and `generate_artifacts`: gradients of the training model."""

from __future__ import annotations

import io
import logging
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from nn.layers import LAYERS, SIZE, Layer, assert_same, drawn, sampled
from onnxtrain.artifacts import generate_artifacts
from onnxtrain.nn import stop_gradient

pytestmark = pytest.mark.torch

EXPORTERS = ("dynamo", "dynamo-unoptimized", "torchscript")


class Net(nn.Module):
    """A layer behind parameters, which get a gradient through the layer's statistics unless these are stopped."""

    def __init__(self, layer: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.layer = layer
        self.weight = nn.Parameter(scale * torch.linspace(0.5, 1.5, SIZE))
        self.position = nn.Parameter(scale * torch.linspace(-1, 1, 5).unsqueeze(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.weight + self.position)


class SideBySide(nn.Module):
    """Modules that read the same input: exported once, as most of an export's time is what any takes."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(x) for part in self.parts])


class AndBack(Net):
    """RINorm around a nonlinear map."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(super().forward(x)) + self.layer.transform(x)
        return self.layer.inverse(y.unsqueeze(-1)).squeeze(-1)


def warnings_of(caplog) -> list[logging.LogRecord]:
    """Return the records that this package has logged; PyTorch's exporters log, too."""
    return [record for record in caplog.records if record.name.startswith("onnxtrain")]


def exported(
    net: nn.Module, x: torch.Tensor, exporters: Iterable[str] = EXPORTERS
) -> dict[str, onnx.ModelProto]:
    """With a batch of any size, by exporter. Dynamo's captures once: what its optimizer does comes last."""
    models = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations in PyTorch's exporters
        if "torchscript" in exporters:
            buffer = io.BytesIO()
            training = torch.onnx.TrainingMode.TRAINING
            axes = {"x": {0: "batch"}}
            torch.onnx.export(
                net, (x,), buffer, input_names=["x"], dynamo=False, training=training, dynamic_axes=axes
            )
            models["torchscript"] = onnx.load_from_string(buffer.getvalue())
        if {"dynamo", "dynamo-unoptimized"} & set(exporters):
            sizes = ({0: torch.export.Dim("batch", min=2, max=64)},)
            program = torch.onnx.export(
                net, (x,), input_names=["x"], dynamo=True, verbose=False, optimize=False, dynamic_shapes=sizes
            )
            models["dynamo-unoptimized"] = program.model_proto
            program.optimize()
            models["dynamo"] = program.model_proto
    return {exporter: models[exporter] for exporter in exporters}


def training_models(
    net: nn.Module, x: torch.Tensor, directory: Path, exporters: Iterable[str] = EXPORTERS
) -> dict[str, onnx.ModelProto]:
    """By exporter; the artifacts are in a folder of its name."""
    names = [name for name, _ in net.named_parameters()]
    models = {}
    for exporter, model in exported(net, x, exporters).items():
        generate_artifacts(model, loss="mse", requires_grad=names, artifact_directory=directory / exporter)
        models[exporter] = onnx.load(directory / exporter / "training_model.onnx")
    return models


def ops(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def onnx_step(model: onnx.ModelProto, net: nn.Module, x: torch.Tensor, target: torch.Tensor):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    parameters = {name: p.detach().numpy() for name, p in net.named_parameters()}
    (target_name,) = set(names) - {"x"} - parameters.keys()
    outputs = [output.name for output in session.get_outputs()]
    values = session.run(outputs, {"x": x.numpy(), target_name: target.numpy(), **parameters})
    return {name: torch.from_numpy(np.asarray(value)) for name, value in zip(outputs, values, strict=True)}


def torch_step(net: nn.Module, x: torch.Tensor, target: torch.Tensor, loss: str):
    net.zero_grad()
    value = nn.functional.mse_loss(net(x), target)
    value.backward()
    return {loss: value.detach(), **{f"{name}_grad": p.grad for name, p in net.named_parameters()}}


def assert_gradients_of_torch(net: nn.Module, dtype, directory, tolerance=None, exporters=EXPORTERS):
    """For two batches, one of a size that the exporter has not seen; returns the training models."""
    models = training_models(net, sampled((3, 5, SIZE), dtype), directory, exporters)
    for model in models.values():
        for batch in (3, 4):
            x = sampled((batch, 5, SIZE), dtype)
            with torch.no_grad():
                target = torch.cos(net(x))
            want = torch_step(net, x, target, model.graph.output[0].name)
            assert_same(onnx_step(model, net, x, target), want, tolerance)
    return models


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(
    ("dtype", "exporters"),
    [(torch.float64, EXPORTERS), (torch.float32, ["dynamo"])],
    ids=["float64", "float32"],
)
@pytest.mark.parametrize("centered", [True, False], ids=["LayerNorm", "others"])
def test_gradients_of_torch(centered, dtype, exporters, tmp_path, caplog):
    layers = [layer for layer in LAYERS if layer.name.startswith("LayerNorm") == centered]
    # A LayerNorm divides the row of zeros by sqrt(eps); ONNX keeps that epsilon in float32.
    looser = 1e-8 if dtype == torch.float64 else 1e-5
    net = SideBySide([Net(layer.ours(dtype), 1 + k / 8) for k, layer in enumerate(layers)]).to(dtype)
    with caplog.at_level(logging.WARNING, logger="onnxtrain"):
        assert_gradients_of_torch(net, dtype, tmp_path, looser if centered else None, exporters)
    assert not warnings_of(caplog)


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_forward_transform_and_inverse(affine, tmp_path):
    net = AndBack(Layer("RINorm", {"affine": affine}).ours()).double()
    assert_gradients_of_torch(net, torch.float64, tmp_path)


def assert_plain_evaluation(directory: Path) -> None:
    for exporter in EXPORTERS:
        eval_model = onnx.load(directory / exporter / "eval_model.onnx")
        assert {node.domain for node in eval_model.graph.node} == {""}


@pytest.mark.parametrize("make", [Layer.ours, Layer.theirs], ids=["ours", "darts"])
def test_rms_norm_is_one_op_forward_and_one_backward(make, tmp_path):
    net = make(Layer("RMSNorm"))
    for model in training_models(net, sampled((3, 5, SIZE), torch.float32), tmp_path).values():
        found = ops(model)
        assert found["FlooredRMSNormalization_float"] == 1
        assert found["FlooredRMSNormalizationGradient_float"] == 1
        assert found.keys().isdisjoint({"ReduceL2", "Clip", "Where"})
    assert_plain_evaluation(tmp_path)


@pytest.mark.parametrize("layer", [Layer("LayerNorm"), Layer("LayerNormNoBias")], ids=str)
def test_layer_norm_is_one_op_forward_and_one_backward(layer, tmp_path):
    net, x = Net(layer.ours()), sampled((3, 5, SIZE), torch.float32)
    assert ops(exported(net, x, ["torchscript"])["torchscript"])["LayerNormalization"] == 1
    for model in training_models(net, x, tmp_path).values():
        found = ops(model)
        assert found["LayerNormalizationTraining_float"] == found["LayerNormalizationGradient_float"] == 1


@pytest.mark.parametrize("make", [Net, AndBack], ids=["forward", "transform and inverse"])
def test_rin_norm_is_one_op_forward_and_one_backward(make, tmp_path):
    net = make(Layer("RINorm").ours())
    for model in training_models(net, sampled((3, 5, SIZE), torch.float32), tmp_path).values():
        found = ops(model)
        assert found["ReversibleInstanceNormalization_float"] == 1
        assert found["ReversibleInstanceNormalizationGradient_float"] == 1
        assert found["ReduceMean"] == 2  # of the loss, in blocks and over the blocks
        assert found["Sqrt"] == found["Where"] == 0
    assert_plain_evaluation(tmp_path)


def test_rin_norm_at_the_front_has_gradients_of_its_parameters_only(tmp_path):
    net = Layer("RINorm").ours()
    for model in assert_gradients_of_torch(net, torch.float32, tmp_path).values():
        found = ops(model)
        assert found["ReversibleInstanceNormalizationParameterGradient_float"] == 1
        assert found["ReversibleInstanceNormalizationGradient_float"] == 0


class Handmade(nn.Module):
    """Detaches as a user may."""

    def __init__(self, detach) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, SIZE))
        self.detach = detach

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        scale = self.detach(x.abs().mean(1, keepdim=True))
        return x / scale


def test_stop_gradient_survives_where_detach_does_not(tmp_path, caplog):
    assert_gradients_of_torch(Handmade(stop_gradient).double(), torch.float64, tmp_path)
    assert not warnings_of(caplog)


def test_detach_survives_without_optimizer(tmp_path, caplog):
    for name, net in {
        "handmade": Handmade(torch.Tensor.detach),
        "darts": Net(Layer("RINorm").theirs()),
    }.items():
        assert_gradients_of_torch(
            net.double(), torch.float64, tmp_path / name, exporters=["dynamo-unoptimized"]
        )
    assert not warnings_of(caplog)


@pytest.mark.parametrize(
    "make",
    [lambda: Handmade(torch.Tensor.detach), lambda: Net(Layer("RINorm").theirs())],
    ids=["detach", "darts"],
)
def test_a_detach_that_the_optimizer_has_removed_is_reported(make, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="onnxtrain"):
        training_models(make(), sampled((3, 5, SIZE), torch.float32), tmp_path, ["dynamo"])
    (record,) = warnings_of(caplog)
    assert "calls detach()" in record.message
    assert "optimize=False" in record.message


def test_a_detach_of_the_input_alone_is_nothing_to_report(tmp_path, caplog):
    """Statistics of the data: no parameter gets a gradient through them anyway."""
    with caplog.at_level(logging.WARNING, logger="onnxtrain"):
        training_models(Layer("RINorm").theirs(), sampled((3, 5, SIZE), torch.float32), tmp_path, ["dynamo"])
    assert not warnings_of(caplog)


def test_darts_layer_at_the_front_has_the_gradients_of_torch(tmp_path):
    """The exporter of Dynamo writes darts' numbers in float32."""
    net = drawn(nn.Sequential(Layer("RINorm").theirs(), Layer("RMSNorm").theirs())).double()
    assert_gradients_of_torch(net, torch.float64, tmp_path, 1e-6)


class ThereAndBack(Net):
    """forward and inverse of RINorm, which both darts' class and this one have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer.inverse(torch.tanh(super().forward(x)).unsqueeze(-1)).squeeze(-1)


def test_forward_and_inverse_in_float32(tmp_path):
    assert_gradients_of_torch(ThereAndBack(Layer("RINorm").ours()), torch.float32, tmp_path, 3e-6)


def test_darts_inverse_has_the_gradients_of_torch_without_optimizer(tmp_path):
    """With it, what `inverse` computes from parameters alone is a constant of the exported graph."""
    net = ThereAndBack(Layer("RINorm").theirs())
    assert_gradients_of_torch(net, torch.float32, tmp_path, 3e-6, ["dynamo-unoptimized"])
    optimized = exported(net, sampled((3, 5, SIZE), torch.float32), ["dynamo"])["dynamo"]
    exported_names = {i.name for i in optimized.graph.initializer}
    assert {name for name in exported_names if name.startswith(("view", "unsqueeze", "add"))}
