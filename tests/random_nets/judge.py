"""Trains a network in several ways and compares every number with PyTorch's in float64."""

from __future__ import annotations

import copy
import io
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from onnxtrain import generate_artifacts
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.ortmodule import ORTModule

from .drawing import Net

__all__ = ["WAYS", "judge"]

RATE = 0.05
TIMES_EAGER = 10
"""An error may be this many times that of eager PyTorch in float32."""

RELATIVE = 3e-5
"""An error may always be this part of the largest element of a tensor, and a third of it of the largest gradient."""

FLOAT64 = 1e-9

WAYS = ("ORTModule", "ORTModule, stock", "ORTModule, float64", "device", "device, stock")
"""ORTModule and the on-device API, with native kernels, and without them."""

Numbers = dict[str, torch.Tensor]


def judge(net: Net) -> list[str]:
    """Returns a line for each way and number that is farther from PyTorch's in float64 than rounding explains."""
    exact = _trained(copy.deepcopy(net.module).double(), net, dtype=torch.float64)
    eager = _trained(copy.deepcopy(net.module), net)
    moved = [_moved(net, attempt) for attempt in range(2)]
    near = [(eager, exact), *((numbers, exact) for numbers in moved)]
    near += [_eager_elsewhere(net, attempt) for attempt in range(4)]
    found = []
    for way in WAYS:
        numbers = _by(way, net)
        bounds = _bounds(exact, near, FLOAT64 if "float64" in way else RELATIVE)
        for name, value in numbers.items():
            error = float((value.double() - exact[name]).abs().max())
            if not error <= bounds[name]:
                found.append(f"{way}: {name} is off by {error:.3g}, allowed {bounds[name]:.3g}")
    return found


def _bounds(exact: Numbers, near: list[tuple[Numbers, Numbers]], relative: float) -> dict[str, float]:
    """Returns how far each number may be off.

    Args:
        exact: in float64.
        near: pairs that differ as much as a correct result may differ from `exact`: eager PyTorch in float32 and in
            float64, at the inputs and near them; and, near a kink, float64 from inputs and parameters that were moved
            by a rounding error.
        relative: the least error that is allowed, as a part of the largest element.
    """
    scales = {kind: max((_largest(v) for n, v in exact.items() if n.startswith(kind)), default=0.0)
              for kind in ("loss", "gradient", "state")}  # fmt: skip
    bounds = {}
    for name, value in exact.items():
        scale = _largest(value) + 0.3 * scales[name.split()[0]]
        errors = [
            float((numbers[name].double() - right[name]).abs().max()) if value.numel() else 0.0
            for numbers, right in near
        ]
        bounds[name] = relative * scale + (0.0 if relative == FLOAT64 else TIMES_EAGER * max(errors))
    return bounds


def _largest(value: torch.Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def _moved(net: Net, attempt: int) -> Numbers:
    """Trains in float64, from parameters and inputs that differ by 1e-7 of their size."""
    torch.manual_seed(attempt)
    module = copy.deepcopy(net.module).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + 1e-7 * torch.randn_like(parameter))
    inputs = tuple(x.double() * (1 + 1e-7 * torch.randn_like(x.double())) for x in net.inputs)
    return _trained(module, Net(net.module, inputs, net.labels), dtype=torch.float64)


def _eager_elsewhere(net: Net, attempt: int) -> tuple[Numbers, Numbers]:
    """Trains in float32 and float64 from inputs that differ by 1e-5 of their size.

    Large terms that cancel, as in the gradient of a bias before BatchNorm, leave rounding errors. In some networks of
    small batches eager PyTorch's errors cancel, too: one run alone does not show their size.
    """
    torch.manual_seed(attempt)
    inputs = tuple(x * (1 + 1e-5 * torch.randn_like(x)) for x in net.inputs)
    moved = Net(net.module, inputs, net.labels)
    right = _trained(copy.deepcopy(net.module).double(), moved, dtype=torch.float64)
    return _trained(copy.deepcopy(net.module), moved), right


def _trained(
    model: nn.Module, net: Net, inner: nn.Module | None = None, dtype: torch.dtype = torch.float32
) -> Numbers:
    """Returns loss, gradients and state of two steps of gradient descent."""
    inner = inner or model
    numbers: Numbers = {}
    for step, (x, labels) in enumerate(zip(net.inputs, net.labels, strict=True)):
        inner.zero_grad()
        loss = F.cross_entropy(model(x.to(dtype)), labels)
        loss.backward()
        numbers[f"loss {step}"] = loss.detach()
        for name, parameter in inner.named_parameters():
            assert parameter.grad is not None
            numbers[f"gradient {step} of {name}"] = parameter.grad.clone()
        with torch.no_grad():
            for parameter in inner.parameters():
                parameter -= RATE * parameter.grad
    numbers |= {f"state {name}": value.detach().clone() for name, value in inner.state_dict().items()}
    return numbers


def _by(way: str, net: Net) -> Numbers:
    with _kernels("off" if "stock" in way else "auto"):
        if way.startswith("device"):
            return _on_device(net)
        dtype = torch.float64 if "float64" in way else torch.float32
        inner = copy.deepcopy(net.module).to(dtype)
        with warnings.catch_warnings():
            if dtype == torch.float64:  # for some ops, Conv among them, ONNX Runtime has no float64 kernel
                warnings.filterwarnings("ignore", "ORTModule: graph")
            return _trained(ORTModule(inner), net, inner, dtype)


@contextmanager
def _kernels(setting: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNXTRAIN_KERNELS", setting)
        yield


def _on_device(net: Net) -> Numbers:
    """Trains the exported network by the on-device API."""
    numbers: Numbers = {}
    with tempfile.TemporaryDirectory() as folder:
        generate_artifacts(
            _exported(net),
            loss="cross_entropy",
            optimizer="sgd",
            requires_grad=[name for name, _ in net.module.named_parameters()],
            batch_norm="training" if _has_batch_norm(net) else "as_exported",
            artifact_directory=folder,
        )
        state = CheckpointState.load_checkpoint(Path(folder, "checkpoint"))
        module = Module(Path(folder, "training_model.onnx"), state)
        optimizer = Optimizer(Path(folder, "optimizer_model.onnx"), module)
        optimizer.set_learning_rate(RATE)
        for step, (x, labels) in enumerate(zip(net.inputs, net.labels, strict=True)):
            loss = module(x.numpy(), labels.numpy())
            numbers[f"loss {step}"] = torch.as_tensor(loss)
            for name, _ in net.module.named_parameters():
                numbers[f"gradient {step} of {name}"] = torch.tensor(state.parameters[name].grad)
            optimizer.step()
            module.lazy_reset_grad()
        for name, _ in net.module.named_parameters():
            numbers[f"state {name}"] = torch.tensor(state.parameters[name].data)
    return numbers


def _has_batch_norm(net: Net) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in net.module.modules())


def _exported(net: Net) -> onnx.ModelProto:
    buffer = io.BytesIO()
    module = copy.deepcopy(net.module).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        torch.onnx.export(
            module,
            (net.inputs[0],),
            buffer,
            dynamo=False,
            opset_version=17,
            input_names=["x"],
            output_names=["scores"],
            dynamic_axes={"x": {0: "batch"}, "scores": {0: "batch"}},
            do_constant_folding=False,
            training=torch.onnx.TrainingMode.PRESERVE,
            keep_initializers_as_inputs=False,
        )
    return onnx.load_from_string(buffer.getvalue())
