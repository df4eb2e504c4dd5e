"""Gradients of networks exported by both PyTorch exporters, against torch autograd in float64."""

from __future__ import annotations

import copy
import io
import warnings

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from exported.zoo import NETS, Net
from onnxtrain.autodiff import differentiate
from onnxtrain.passes import TrainingModePass, canonicalize, is_constant, load_model

EXPORT_BATCH = 4
UNSEEN_BATCH = 7


def export(net: nn.Module, batch: tuple[torch.Tensor, ...], exporter: str, dynamic: bool) -> onnx.ModelProto:
    """Exports `net`; BatchNorm stays in training mode with the TorchScript exporter only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter == "torchscript":
            buffer = io.BytesIO()
            torch.onnx.export(
                copy.deepcopy(net),
                batch,
                buffer,
                dynamo=False,
                opset_version=17,
                training=torch.onnx.TrainingMode.TRAINING,
                do_constant_folding=False,
                input_names=["x", "target"],
                output_names=["loss"],
                dynamic_axes={"x": {0: "batch"}, "target": {0: "batch"}} if dynamic else None,
            )
            return onnx.load_from_string(buffer.getvalue())
        size = torch.export.Dim("batch", min=2, max=1024)
        program = torch.onnx.export(
            copy.deepcopy(net),
            batch,
            dynamo=True,
            optimize=False,
            verbose=False,
            input_names=["x", "target"],
            output_names=["loss"],
            dynamic_shapes=({0: size}, {0: size}) if dynamic else None,
        )
        return program.model_proto


def torch_gradients(
    net: nn.Module, batch: tuple[torch.Tensor, ...], dtype: torch.dtype
) -> dict[str, np.ndarray]:
    net = copy.deepcopy(net).to(dtype)
    net(*(t.to(dtype) if t.is_floating_point() else t for t in batch)).backward()
    return {name: p.grad.double().numpy() for name, p in net.named_parameters()}


def onnx_gradients(
    model: onnx.ModelProto, net: nn.Module, batch: tuple[torch.Tensor, ...], training: bool
) -> dict[str, np.ndarray]:
    canonical = canonicalize(load_model(model))
    if training:
        TrainingModePass(batch_norm="training", dropout="training")(canonical)
    names = {name for name, value in canonical.graph.initializers.items() if not is_constant(value)}
    parameters = [name for name, _ in net.named_parameters()]
    assert set(parameters) <= names, f"the exporter renamed {set(parameters) - names}"
    step = differentiate(canonical, of="loss", wrt=parameters)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(onnx_bytes(step), options, providers=["CPUExecutionProvider"])
    feeds = dict(zip(["x", "target"], (t.numpy() for t in batch), strict=True))
    values = session.run([f"{name}_grad" for name in parameters], feeds)
    return dict(zip(parameters, values, strict=True))


def onnx_bytes(model: object) -> bytes:
    import onnx_ir as ir

    return ir.to_proto(model).SerializeToString()


def relative_error(gradients: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> float:
    difference = sum(float(((gradients[n] - r) ** 2).sum()) for n, r in reference.items())
    return float(np.sqrt(difference / sum(float((r**2).sum()) for r in reference.values())))


@pytest.mark.sample(every=4)
@pytest.mark.torch
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("net", NETS, ids=lambda net: net.name)
def test_gradients_match_torch(net: Net, exporter: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    module = net.make().train()
    model = export(module, net.batch(EXPORT_BATCH), exporter, dynamic)
    batch = net.batch(UNSEEN_BATCH if dynamic else EXPORT_BATCH)
    reference = torch_gradients(module, batch, torch.float64)
    own_error = relative_error(torch_gradients(module, batch, torch.float32), reference)
    error = relative_error(onnx_gradients(model, module, batch, training=net.batch_norm), reference)
    print(
        f"{net.name} {exporter} {'dynamic' if dynamic else 'static'}: {error:.2e}, torch float32 {own_error:.2e}"
    )
    assert error <= 2 * own_error + 1e-6
