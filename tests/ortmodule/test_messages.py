"""Messages name the user's code and causes; PyTorch's own tracebacks stay out of them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxtrain.ortmodule import ORTModule
from ortmodule.eager import strict

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


class Net(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self.layer, *args)


def without_fallback(function: Callable[..., Any]) -> ORTModule:
    return strict(Net(function))


def test_pytorch_prints_no_traceback_of_what_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    model = without_fallback(lambda layer, x, n: F.pad(layer(x), (n, n)))
    for n in (1, 2, 3):
        model(torch.randn(2, 4), n)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_wrong_dtype_raises_pytorchs_error_and_nothing_else() -> None:
    x = torch.randn(2, 4, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="must have the same dtype, but got Double and Float"):
            ORTModule(nn.Linear(4, 4))(x)


def _force(layer: nn.Module, x: torch.Tensor) -> Any:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)[0]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
def test_gradient_taken_in_forward_is_no_part_of_the_capture() -> None:
    model = without_fallback(_force)
    plain, x = model.module, torch.randn(3, 4)
    for module in (plain, model):
        module.zero_grad()
        module(x).square().sum().backward()
        if module is plain:
            expected = plain.layer.weight.grad.clone()
    torch.testing.assert_close(plain.layer.weight.grad, expected)
    assert len(model.report()) == 2  # Dynamo ends one at requires_grad_, one at torch.autograd.grad


def test_many_models_are_not_many_captures_of_one() -> None:
    for _ in range(66):
        ORTModule(nn.Sequential(nn.Identity(), nn.Tanh()))(torch.ones(1))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
        return ct


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "function",
    [lambda layer, x: (layer(x), x.view(-1)), lambda layer, x: Square.apply(layer(x)) + 1],
    ids=["view of an input", "custom function"],
)
def test_global_hooks_see_the_modules_of_the_user_only(function: Callable[..., Any]) -> None:
    model = ORTModule(Net(function))
    x = torch.randn(2, 4)
    model(x)
    seen: dict[str, int] = {}
    called = _Recorder(seen)
    handles = [
        nn.modules.module.register_module_forward_pre_hook(called),
        nn.modules.module.register_module_forward_hook(called),
    ]
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    assert seen.keys() <= {"Net", "Linear"}
    assert "Net" in seen


class _Recorder:
    def __init__(self, seen: dict[str, int]) -> None:
        self.seen = seen

    @torch.compiler.disable  # else Dynamo would write what it found into the dict, and lose the rest
    def __call__(self, module: nn.Module, *args: Any) -> None:
        self.seen[type(module).__name__] = 1


def _caught(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    h = layer(x)
    try:
        return h @ torch.ones(7, 7)
    except RuntimeError:
        return h * 2


def test_error_that_the_module_catches_does_not_reach_the_caller() -> None:
    model = ORTModule(Net(_caught))
    x = torch.randn(2, 4)
    with pytest.warns(UserWarning, match="runs in PyTorch"):
        out = model(x)
    torch.testing.assert_close(out, model.module(x))
    assert not model.report().runs_in_onnxruntime
