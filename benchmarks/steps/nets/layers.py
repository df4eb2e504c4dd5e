"""The norm layers alone: three of a kind in a row, so that gradients flow through two of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from onnxtrain.nn import RINorm, RMSNorm
from steps.nets._net import CLASSES, Batch, Net, labels, normal

__all__ = ["NETS"]


class _Three(nn.Module):
    """Three norm layers, a mean over all axes but batch and channels, and a dense head."""

    def __init__(self, norm: Callable[[int], nn.Module], channels: int, axis: int) -> None:
        super().__init__()
        self.norms = nn.Sequential(*(norm(channels) for _ in range(3)))
        self.axes = tuple(a for a in range(1, 3 if axis == 2 else 4) if a != axis)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The square keeps the mean of what was just normalised from being zero.
        hidden = self.norms(x)
        return self.head((hidden * hidden).mean(self.axes))


def _tokens(rng: np.random.Generator, batch: int) -> Batch:
    return normal(rng, batch, 512, 768), labels(rng, batch)


def _maps(rng: np.random.Generator, batch: int) -> Batch:
    return normal(rng, batch, 64, 32, 32), labels(rng, batch)


def _last(norm: Callable[[int], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: _Three(norm, 768, 2)


def _channels(norm: Callable[[int], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: _Three(norm, 64, 1)


NETS = {
    "layernorm": Net("3 x LayerNorm, 512x768", _last(nn.LayerNorm), _tokens, (8,)),
    "rmsnorm": Net("3 x RMSNorm, 512x768", _last(RMSNorm), _tokens, (8,)),
    "rinorm": Net("3 x RINorm, 512x768", _last(RINorm), _tokens, (8,)),
    "batchnorm": Net("3 x BatchNorm2d, 64x32x32", _channels(nn.BatchNorm2d), _maps, (32,), images=True),
    "groupnorm": Net(
        "3 x GroupNorm(8), 64x32x32", _channels(lambda c: nn.GroupNorm(8, c)), _maps, (32,), images=True
    ),
}
