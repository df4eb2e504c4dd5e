"""The layers through both exporters of PyTorch and `generate_artifacts`: gradients of the training model."""

from __future__ import annotations

import io
import logging
import warnings
from collections import Counter

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

EXPORTERS = {
    "dynamo": {"dynamo": True, "verbose": False},
    "dynamo-unoptimized": {"dynamo": True, "verbose": False, "optimize": False},
    "torchscript": {"dynamo": False, "training": torch.onnx.TrainingMode.TRAINING},
}
each_exporter = pytest.mark.parametrize("exporter", EXPORTERS)


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
    """What this package has logged; PyTorch's exporters log too."""
    return [record for record in caplog.records if record.name.startswith("onnxtrain")]


def exported(net: nn.Module, x: torch.Tensor, exporter: str) -> onnx.ModelProto:
    """With a batch of any size."""
    dynamic = (
        {"dynamic_axes": {"x": {0: "batch"}}}
        if exporter == "torchscript"
        else {"dynamic_shapes": ({0: torch.export.Dim("batch", min=2, max=64)},)}
    )
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations in PyTorch's exporters
        torch.onnx.export(net, (x,), buffer, input_names=["x"], **EXPORTERS[exporter], **dynamic)
    return onnx.load_from_string(buffer.getvalue())


def training_model(net: nn.Module, x: torch.Tensor, exporter: str, directory) -> onnx.ModelProto:
    names = [name for name, _ in net.named_parameters()]
    generate_artifacts(
        exported(net, x, exporter), loss="mse", requires_grad=names, artifact_directory=directory
    )
    return onnx.load(directory / "training_model.onnx")


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


def assert_gradients_of_torch(net: nn.Module, exporter: str, dtype, directory, tolerance=None):
    """For two batches, one of a size that the exporter has not seen."""
    model = training_model(net, sampled((3, 5, SIZE), dtype), exporter, directory)
    for batch in (3, 4):
        x = sampled((batch, 5, SIZE), dtype)
        with torch.no_grad():
            target = torch.cos(net(x))
        want = torch_step(net, x, target, model.graph.output[0].name)
        assert_same(onnx_step(model, net, x, target), want, tolerance)
    return model


@pytest.mark.parametrize(
    ("exporter", "dtype"),
    [*((exporter, torch.float64) for exporter in EXPORTERS), ("dynamo", torch.float32)],
    ids=lambda value: str(value).removeprefix("torch."),
)
@pytest.mark.parametrize("centered", [True, False], ids=["LayerNorm", "others"])
def test_gradients_of_torch(centered, exporter, dtype, tmp_path, caplog):
    layers = [layer for layer in LAYERS if layer.name.startswith("LayerNorm") == centered]
    # A LayerNorm divides the row of zeros by sqrt(eps); ONNX keeps that epsilon in float32.
    looser = 1e-8 if dtype == torch.float64 else 1e-5
    net = SideBySide([Net(layer.ours(dtype), 1 + k / 8) for k, layer in enumerate(layers)]).to(dtype)
    with caplog.at_level(logging.WARNING, logger="onnxtrain"):
        assert_gradients_of_torch(net, exporter, dtype, tmp_path, looser if centered else None)
    assert not warnings_of(caplog)


@each_exporter
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_forward_transform_and_inverse(affine, exporter, tmp_path):
    net = AndBack(Layer("RINorm", {"affine": affine}).ours()).double()
    assert_gradients_of_torch(net, exporter, torch.float64, tmp_path)


@each_exporter
@pytest.mark.parametrize("make", [Layer.ours, Layer.theirs], ids=["ours", "darts"])
def test_rms_norm_is_one_op_forward_and_one_backward(make, exporter, tmp_path):
    net = make(Layer("RMSNorm"))
    model = training_model(net, sampled((3, 5, SIZE), torch.float32), exporter, tmp_path)
    found = ops(model)
    assert found["FlooredRMSNormalization_float"] == 1
    assert found["FlooredRMSNormalizationGradient_float"] == 1
    assert found.keys().isdisjoint({"ReduceL2", "Clip", "Where", "ReduceMean"} - {"ReduceMean"})
    eval_model = onnx.load(tmp_path / "eval_model.onnx")
    assert {node.domain for node in eval_model.graph.node} == {""}


@each_exporter
@pytest.mark.parametrize("layer", [Layer("LayerNorm"), Layer("LayerNormNoBias")], ids=str)
def test_layer_norm_is_one_op_forward_and_one_backward(layer, exporter, tmp_path):
    net = Net(layer.ours())
    if exporter == "torchscript":
        model = exported(net, sampled((3, 5, SIZE), torch.float32), exporter)
        assert ops(model)["LayerNormalization"] == 1
    found = ops(training_model(net, sampled((3, 5, SIZE), torch.float32), exporter, tmp_path))
    assert found["LayerNormalizationTraining_float"] == found["LayerNormalizationGradient_float"] == 1


@each_exporter
@pytest.mark.parametrize("make", [Net, AndBack], ids=["forward", "transform and inverse"])
def test_rin_norm_is_one_op_forward_and_one_backward(make, exporter, tmp_path):
    net = make(Layer("RINorm").ours())
    found = ops(training_model(net, sampled((3, 5, SIZE), torch.float32), exporter, tmp_path))
    assert found["ReversibleInstanceNormalization_float"] == 1
    assert found["ReversibleInstanceNormalizationGradient_float"] == 1
    assert found["ReduceMean"] == 1  # of the loss
    assert found["Sqrt"] == found["Where"] == 0
    eval_model = onnx.load(tmp_path / "eval_model.onnx")
    assert {node.domain for node in eval_model.graph.node} == {""}


@each_exporter
def test_rin_norm_at_the_front_has_gradients_of_its_parameters_only(exporter, tmp_path):
    net = Layer("RINorm").ours()
    found = ops(training_model(net, sampled((3, 5, SIZE), torch.float32), exporter, tmp_path))
    assert found["ReversibleInstanceNormalizationParameterGradient_float"] == 1
    assert found["ReversibleInstanceNormalizationGradient_float"] == 0
    assert_gradients_of_torch(net, exporter, torch.float32, tmp_path)


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


@each_exporter
def test_stop_gradient_survives_where_detach_does_not(exporter, tmp_path, caplog):
    assert_gradients_of_torch(Handmade(stop_gradient).double(), exporter, torch.float64, tmp_path)
    assert not warnings_of(caplog)


def test_detach_survives_without_optimizer(tmp_path, caplog):
    net = Handmade(torch.Tensor.detach).double()
    assert_gradients_of_torch(net, "dynamo-unoptimized", torch.float64, tmp_path)
    net = Net(Layer("RINorm").theirs()).double()
    assert_gradients_of_torch(net, "dynamo-unoptimized", torch.float64, tmp_path)
    assert not warnings_of(caplog)


@pytest.mark.parametrize(
    "make",
    [lambda: Handmade(torch.Tensor.detach), lambda: Net(Layer("RINorm").theirs())],
    ids=["detach", "darts"],
)
def test_a_detach_that_the_optimizer_has_removed_is_reported(make, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="onnxtrain"):
        training_model(make(), sampled((3, 5, SIZE), torch.float32), "dynamo", tmp_path)
    (record,) = warnings_of(caplog)
    assert "calls detach()" in record.message
    assert "optimize=False" in record.message


def test_a_detach_of_the_input_alone_is_nothing_to_report(tmp_path, caplog):
    """Statistics of the data: no parameter gets a gradient through them anyway."""
    with caplog.at_level(logging.WARNING, logger="onnxtrain"):
        training_model(Layer("RINorm").theirs(), sampled((3, 5, SIZE), torch.float32), "dynamo", tmp_path)
    assert not warnings_of(caplog)


def test_darts_layer_at_the_front_has_the_gradients_of_torch(tmp_path):
    """The exporter of Dynamo writes darts' numbers in float32."""
    for exporter in EXPORTERS:
        (tmp_path / exporter).mkdir()
        net = drawn(nn.Sequential(Layer("RINorm").theirs(), Layer("RMSNorm").theirs())).double()
        assert_gradients_of_torch(net, exporter, torch.float64, tmp_path / exporter, 1e-6)


class ThereAndBack(Net):
    """forward and inverse of RINorm, which both darts' class and this one have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer.inverse(torch.tanh(super().forward(x)).unsqueeze(-1)).squeeze(-1)


@each_exporter
def test_forward_and_inverse_in_float32(exporter, tmp_path):
    assert_gradients_of_torch(ThereAndBack(Layer("RINorm").ours()), exporter, torch.float32, tmp_path, 3e-6)


def test_darts_inverse_has_the_gradients_of_torch_without_optimizer(tmp_path):
    """With it, what `inverse` computes from parameters alone is a constant of the exported graph."""
    net = ThereAndBack(Layer("RINorm").theirs())
    assert_gradients_of_torch(net, "dynamo-unoptimized", torch.float32, tmp_path, 3e-6)
    exported_names = {
        i.name for i in exported(net, sampled((3, 5, SIZE), torch.float32), "dynamo").graph.initializer
    }
    assert {name for name in exported_names if name.startswith(("view", "unsqueeze", "add"))}
