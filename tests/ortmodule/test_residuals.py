"""Residuals between forward and backward, few (saved as tensors) and many (kept as values of ONNX Runtime)."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule.eager import compare, gradients, strict

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


class Deep(nn.Module):
    """Two outputs behind so many layers, each of which keeps its result and whether it is positive."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 2)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for layer in self.layers:
            x = torch.where(x > 0.1, layer(x).tanh(), x.sin())
        return tuple(head(x) for head in self.heads)


many_and_few = pytest.mark.parametrize("layers", [2, 12], ids=["few", "many"])


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 12).reshape(3, 4)


def is_kept_as_values(result: Any) -> bool:
    return bool(result.grad_fn.kept.residuals)


@many_and_few
def test_how_they_are_kept(layers: int) -> None:
    assert is_kept_as_values(strict(Deep(layers))(batch())[0]) == (layers == 12)


@many_and_few
@pytest.mark.parametrize("used", [[0], [1], [0, 1]], ids=str)
def test_gradients_of_some_outputs(layers: int, used: list[int]) -> None:
    def program(model: nn.Module) -> Any:
        results = []
        for _ in range(3):
            model.zero_grad()
            outputs = model(batch())
            sum(outputs[index].square().sum() for index in used).backward()
            results.append(gradients(model))
        return results

    compare(Deep(layers), program, wrap=strict)


@many_and_few
def test_a_graph_serves_as_long_as_it_is_retained(layers: int) -> None:
    def program(model: nn.Module) -> Any:
        loss = model(batch())[0].square().sum()
        later = model(batch() / 2)[0].sum()
        loss.backward(retain_graph=True)
        later.backward()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        return gradients(model)

    compare(Deep(layers), program, wrap=strict)


@many_and_few
def test_hooks_on_saved_tensors_see_them(layers: int) -> None:
    sizes: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor.clone()

    def program(model: nn.Module) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(batch())[0].square().sum()
        loss.backward()
        return gradients(model)

    compare(Deep(layers), program, wrap=strict)
    assert sizes.count(12) >= 2 * layers


@many_and_few
def test_they_are_freed_by_backward(layers: int) -> None:
    model = strict(Deep(layers))
    model(batch())
    x = batch()
    output = model(x)[0]
    of_input, of_residuals = weakref.ref(x), output.grad_fn.kept  # type: ignore[union-attr]
    assert of_residuals is not None
    del x, of_residuals
    output.sum().backward(retain_graph=True)
    assert of_input() is not None
    output.sum().backward()
    # The output keeps its `grad_fn`, which must not keep anything else.
    assert of_input() is None
    assert output.grad_fn.kept is None  # type: ignore[union-attr]


@many_and_few
def test_second_derivatives(layers: int) -> None:
    def program(model: nn.Module) -> Any:
        x = batch().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x)[0].square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return gradient.detach(), x.grad

    compare(Deep(layers), program, wrap=strict)
