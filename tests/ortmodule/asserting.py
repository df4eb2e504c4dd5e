"""Modules that assert something of tensors. Not in a test file: pytest would rewrite the assertions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class OfInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert (x.abs() < 100).all(), "out of range"
        return self.layer(x)


class OfResult(OfInput):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        assert h.sum().isfinite()
        h = torch.tanh(h)
        assert h.abs().max() <= 1, "not a tangent"
        return h * 2


class OfArgument(OfInput):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert((x.abs() < 100).all(), "out of range")
        return self.layer(x)


class BeforeIndex(OfInput):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = x[:, 0].long()
        assert (index.abs() < 3).all(), "no such row"
        return self.layer(self.layer.weight[index])


class Checkpointed(OfInput):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * ct


class BesideCustomFunction(OfInput):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = Square.apply(self.layer(x))
        assert (h < 1e4).all(), "too large"
        return h + 1


class InPyTorch(OfInput):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.linalg.qr(x)[1])


class Pooled(OfInput):
    """Has a second derivative that PyTorch computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.max_pool1d(super().forward(x).tanh()[:, None], 2)


def counted(x: torch.Tensor) -> torch.Tensor:
    """Asserts something of a number of the data."""
    count = int(x.sum())
    assert count > 5, "too few"
    return x * count
