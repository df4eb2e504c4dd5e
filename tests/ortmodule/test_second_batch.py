"""A second batch of another size is captured too, where sizes are symbolic integers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from onnxtrain.ortmodule import ORTModule

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


CHUNK = 8


def _mask(x: torch.Tensor) -> torch.Tensor:
    """A causal mask, made behind a branch on data in a graph whose only input is the size, as FSMT's is."""
    size = x.shape[1]
    if not x.isfinite().all():
        size = size + 1
    return torch.triu(torch.zeros(size, size, dtype=torch.float32).fill_(-1e9), diagonal=1)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.inner(x) @ x.transpose(1, 2)
        return (scores + _mask(x)).softmax(-1) @ x


class Padded(nn.Module):
    """Chunks padded by what the size leaves, and written one after the other: a gated delta rule in short."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, size, width = x.shape
        missing = (CHUNK - size % CHUNK) % CHUNK
        channels = self.inner(x).transpose(1, 2).contiguous()  # as a convolution leaves it
        heads = channels.transpose(1, 2).reshape(batch, size, 2, width // 2).transpose(1, 2)
        padded = nn.functional.pad(heads, (0, 0, 0, missing))
        result = torch.zeros_like(padded)
        result[:, :, 0] = padded[:, :, 0].tanh()
        for place in range(1, CHUNK):
            result[:, :, place] = result[:, :, place - 1].clone() * 0.5 + padded[:, :, place].tanh()
        return result[:, :, :size].transpose(1, 2).flatten(2)


def check(module: nn.Module, shapes: list[tuple[int, ...]]) -> None:
    """Values and gradients of batches one after the other are eager PyTorch's, and ONNX Runtime computes them."""
    eager = copy.deepcopy(module)
    ours = ORTModule(module)
    for seed, shape in enumerate(shapes):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        results = [net(x) for net in (eager, ours)]
        torch.testing.assert_close(results[1], results[0])
        for net, result in zip((eager, ours), results, strict=True):
            net.zero_grad()
            result.square().sum().backward()
        gradients = [[p.grad for p in net.parameters()] for net in (eager, module)]
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)
    report = ours.report()
    assert not report.fallbacks, str(report)


def test_a_graph_of_a_size_alone() -> None:
    check(Masked(), [(2, 5, 4), (2, 6, 4), (2, 7, 4)])


def test_padding_by_a_remainder_before_writes() -> None:
    check(Padded(), [(2, 5, 4), (3, 5, 4), (3, 7, 4)])
