"""torch.vmap and torch.func in a module: the first is captured, derivatives are PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ortmodule.custom_functions import Scaling
from ortmodule.eager import Of, compare, compare_steps, strict
from ortmodule.test_engine import Between

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


def _outer(h: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: torch.outer(row, row.sin()))(h).sum(-1)


def _detached(h: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: row * row.detach().sin())(h)


def _without_grad(h: torch.Tensor) -> torch.Tensor:
    def scaled(row: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = row.exp()
        return row * scale

    return torch.vmap(scaled)(h)


def _nested(h: torch.Tensor) -> torch.Tensor:
    return torch.vmap(torch.vmap(lambda a, b: a * b.tanh()), in_dims=(0, 1))(h, h.t())


@pytest.mark.parametrize("function", [_outer, _detached, _without_grad, _nested])
def test_vmap_runs_in_onnxruntime(function: Any) -> None:
    ours = compare_steps(Between(function), (3, 4), (5, 4), differentiate_inputs=False, wrap=strict)
    assert ours.report().runs_in_onnxruntime


def _jacobian(h: torch.Tensor) -> torch.Tensor:
    return torch.func.jacrev(lambda v: torch.sin(v) * v.sum())(h[0]).sum() * h


def _gradient(h: torch.Tensor) -> torch.Tensor:
    return torch.vmap(torch.func.grad(lambda row: (row.sin() * row).sum()))(h)


def _directional(h: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(torch.sin, (h,), (h * 2,))[1]


# PyTorch loads its formulas of forward-mode derivatives by it.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("function", [_jacobian, _gradient, _directional])
def test_derivatives_in_a_module_are_pytorchs(function: Any) -> None:
    warns = r"runs in PyTorch: .*torch\.func\.grad"
    ours = compare_steps(Between(function), (3, 4), differentiate_inputs=False, warns=warns)
    assert ours.report().fallbacks


@pytest.mark.parametrize("grad", [True, False])
def test_the_result_of_a_transform_in_pytorch_is_an_input_of_the_next_graph(grad: bool) -> None:
    def forward(module: Of, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return torch.func.vjp(Scaling.apply, y)[1](y)[0] > 0.5

    def program(module: torch.nn.Module) -> torch.Tensor:
        with torch.set_grad_enabled(grad):
            return module(torch.linspace(-1, 1, 12).reshape(3, 4))

    compare(Of(forward), program, ignore="ORTModule")
