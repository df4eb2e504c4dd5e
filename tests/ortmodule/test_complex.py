"""Complex tensors that a graph is given, returns and writes to, against eager PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ortmodule.eager import Of, compare, compare_steps, gradients, strict

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


class Filter(nn.Module):
    """A complex parameter and buffer; complex in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.cfloat))
        self.register_buffer("total", torch.zeros(4, dtype=torch.cfloat))

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = z @ self.weight
        self.total += y.detach().sum(0)
        return y * y.conj().imag, (y + self.total).abs()


def test_complex_parameters_inputs_buffers_and_results() -> None:
    def loss(outputs: list[torch.Tensor]) -> torch.Tensor:
        spectrum, length = outputs
        return (torch.view_as_real(spectrum) ** 2).sum().add(length.sum())

    batches = [torch.randn(batch, 3, dtype=torch.cfloat) for batch in (2, 5, 3)]
    assert compare_steps(Filter(), *batches, loss=loss, wrap=strict, rtol=1e-5).report().runs_in_onnxruntime


def test_complex_conjugated_input() -> None:
    z = torch.randn(2, 3, dtype=torch.cfloat)
    compare(Filter(), lambda module: module(z.conj())[0], wrap=strict)


def test_second_derivative_through_complex_numbers() -> None:
    def rotary(module: Of, x: torch.Tensor) -> torch.Tensor:
        turns = torch.polar(torch.ones(3), torch.arange(3.0))
        pairs = torch.view_as_complex(module.layer(x).view(-1, 3, 2))
        return torch.view_as_real(pairs * turns).flatten(1).square().sum(1)

    x = torch.randn(4, 6)

    def program(module: nn.Module) -> Any:
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(module(leaf).sum(), leaf, create_graph=True)
        gradient.square().sum().backward()
        return leaf.grad, gradients(module)

    compare(Of(rotary, layer=nn.Linear(6, 6)), program)
