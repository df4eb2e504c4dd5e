"""Complex tensors that a graph is given, returns and writes to, against eager PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from onnxtrain.ortmodule import DebugOptions, FallbackPolicy, ORTModule

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


def _step(module: nn.Module, z: torch.Tensor) -> list[torch.Tensor]:
    z = z.clone().requires_grad_()
    module.zero_grad()
    spectrum, length = module(z)
    (torch.view_as_real(spectrum) ** 2).sum().add(length.sum()).backward()
    parts = [spectrum, length, z.grad, *(p.grad for p in module.parameters()), *module.buffers()]
    return [part.detach().clone() for part in parts if part is not None]


def test_complex_parameters_inputs_buffers_and_results() -> None:
    torch.manual_seed(0)
    plain = Filter()
    ours = ORTModule(copy.deepcopy(plain), DebugOptions(fallback_policy=FallbackPolicy.DISABLE))
    for batch in (2, 5, 3):
        z = torch.randn(batch, 3, dtype=torch.cfloat)
        for got, want in zip(_step(ours, z), _step(plain, z), strict=True):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert ours.report().runs_in_onnxruntime


def test_complex_conjugated_input() -> None:
    plain = Filter()
    ours = ORTModule(copy.deepcopy(plain), DebugOptions(fallback_policy=FallbackPolicy.DISABLE))
    z = torch.randn(2, 3, dtype=torch.cfloat)
    torch.testing.assert_close(ours(z.conj())[0], plain(z.conj())[0])


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turns = torch.polar(torch.ones(3), torch.arange(3.0))
        pairs = torch.view_as_complex(self.layer(x).view(-1, 3, 2))
        return torch.view_as_real(pairs * turns).flatten(1).square().sum(1)


def test_second_derivative_through_complex_numbers() -> None:
    torch.manual_seed(0)
    plain = Rotary()
    ours = ORTModule(copy.deepcopy(plain))
    x = torch.randn(4, 6)
    found = []
    for module in (ours, plain):
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(module(leaf).sum(), leaf, create_graph=True)
        gradient.square().sum().backward()
        found.append([leaf.grad, *(p.grad for p in module.parameters())])
    for got, want in zip(*found, strict=True):
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
