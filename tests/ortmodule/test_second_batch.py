"""A second batch of another size is captured too, where sizes are symbolic integers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ortmodule.eager import compare_steps

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


def test_a_graph_of_a_size_alone() -> None:
    ours = compare_steps(Masked(), (2, 5, 4), (2, 6, 4), (2, 7, 4), differentiate_inputs=False)
    assert not ours.report().fallbacks, str(ours.report())


def test_padding_by_a_remainder_before_writes() -> None:
    ours = compare_steps(Padded(), (2, 5, 4), (3, 5, 4), (3, 7, 4), differentiate_inputs=False)
    assert not ours.report().fallbacks, str(ours.report())
