"""Inputs that a module writes to: their gradients, and those of what uses them afterwards, as in eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain.ortmodule import ORTModule
from ortmodule.eager import Of, compare, compare_steps, gradients, strict

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "fill": lambda x, w: x.fill_(0.5),
    "zero": lambda x, w: x.zero_(),
    "copy": lambda x, w: x.copy_(w),
    "copy_detached": lambda x, w: x.copy_(w.detach()),
    "scale": lambda x, w: x.mul_(2.0),
    "column": lambda x, w: x[:, 0].zero_(),
    "all": lambda x, w: x[:].fill_(1.0),
}


def writer(name: str) -> Of:
    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        WRITES[name](x, module.linear.weight[:3])
        return module.linear(x)

    return Of(function, linear=nn.Linear(4, 4))


@pytest.mark.parametrize("used_later", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_gradients(name: str, used_later: bool) -> None:
    compare_steps(writer(name), (3, 4), used_later=used_later, wrap=strict)


def test_writing_to_a_parameter() -> None:
    """Its gradient is that of the value written, although what was written depends on the parameter."""

    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            module.linear.weight.clamp_(-0.1, 0.1)
        return module.linear(x)

    x = torch.randn(3, 4)
    ours = compare_steps(Of(function, linear=nn.Linear(4, 4)), x, x, differentiate_inputs=False)
    assert ours.report().runs_in_onnxruntime


def test_writing_to_a_leaf_raises_as_in_pytorch() -> None:
    ours = ORTModule(writer("fill"))
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        ours(torch.randn(3, 4, requires_grad=True))


def reading(function: Callable[..., object]) -> Of:
    """Applies a function to its argument and its weights."""
    weight = nn.Parameter(torch.linspace(0.2, 1.5, 12).reshape(3, 4))
    return Of(function, weight=weight, recurrent=nn.RNN(4, 3))


def _in_bfloat16(function: Callable[..., object]) -> Callable[..., object]:
    def run(m: Of, x: torch.Tensor) -> object:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function(m, x)

    return run


READERS: dict[str, tuple[Callable[..., object], str]] = {
    "factor": (lambda m, x: x * m.weight, "raises"),
    "product of matrices": (lambda m, x: x @ m.weight.t(), "raises"),
    "dividend": (lambda m, x: x / m.weight, "raises"),
    "view": (lambda m, x: x.t() @ m.weight, "raises"),
    "power": (lambda m, x: x**m.weight, "raises"),
    "expanded": (lambda m, x: x.expand(2, 3, 4) @ m.weight.t(), "goes on"),
    "cast": (lambda m, x: x.bfloat16() * m.weight.bfloat16(), "goes on"),
    "autocast": (_in_bfloat16(lambda m, x: x @ m.weight.t()), "goes on"),
    "recurrent under autocast": (_in_bfloat16(lambda m, x: m.recurrent(x)[0]), "goes on"),
    "convolution under autocast": (
        _in_bfloat16(lambda m, x: torch.nn.functional.conv1d(x[None], m.weight[:, :3, None])),
        "goes on",
    ),
    "function of it": (lambda m, x: x.sin() * m.weight, "goes on"),
    "sum": (lambda m, x: (x + m.weight).square(), "goes on"),
    "both": (lambda m, x: (x.bfloat16() * m.weight, x * m.weight), "raises"),
    "the gradient of another result": (
        lambda m, x: ((x.double() @ m.weight.double().t()), x * m.weight),
        "goes on",
    ),
    "that of another result alone": (
        lambda m, x: (x + m.weight, x * m.weight, x.exp() * m.weight),
        "goes on",
    ),
}
"""By name, what reads an argument, and what backward of eager PyTorch does once the argument has been written to.

Of several results, backward begins at the first, except for "both"."""


@pytest.mark.parametrize("name", READERS)
def test_arguments_that_are_written_to_before_backward(name: str) -> None:
    """PyTorch checks what it has saved: the argument itself, but no copy of it that was made for another dtype."""
    function, expected = READERS[name]

    def program(module: nn.Module) -> Any:
        x = torch.linspace(0.1, 2.3, 12).reshape(3, 4)
        results = module(x)
        results = results if isinstance(results, tuple) else (results,)
        used = results if name == "both" else results[:1]
        x.mul_(3)
        loss = sum((result.double().square().sum() for result in used), torch.zeros(()))
        if expected == "raises":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()
        return gradients(module)

    tolerance = {"rtol": 2e-2, "atol": 5e-2} if "cast" in name else {}
    assert compare(reading(function), program, wrap=strict, **tolerance).report().runs_in_onnxruntime


def test_weights_that_are_written_to_between_two_backward_passes() -> None:
    """Of two heads, one's weights do not matter for the gradient of the other."""

    def program(module: nn.Module) -> None:
        x = torch.linspace(0.1, 2.3, 12, dtype=torch.float32).reshape(3, 4).requires_grad_()
        first, second = module(x)
        with torch.no_grad():
            for parameter in module.recurrent.parameters():
                parameter.mul_(2)
        first.sum().backward(retain_graph=True)
        torch.testing.assert_close(x.grad, module.weight.detach().sum(0).expand(3, 4))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.sum().backward()

    compare(reading(lambda m, x: (x @ m.weight.t(), m.recurrent(x.sin() * x)[0] * 2)), program, wrap=strict)
