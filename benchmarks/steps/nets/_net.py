"""The interface of a net."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import nn

__all__ = ["CLASSES", "Batch", "Net", "labels", "normal"]

CLASSES = 10

Batch = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Net:
    """A net, its data and its loss.

    Attributes:
        about: what it is, for tables.
        make: makes it.
        data: inputs and target of a batch of a size.
        batches: sizes that are timed.
        loss: "cross_entropy" or "mse".
        images: whether its inputs are images, which PyTorch also gets as channels_last.
        counts: what of a step counts: "step", or "update", where the rest is there to make gradients for AdamW.
        rate: learning rate of the steps whose losses are compared.
        draws: whether the net draws random numbers, as dropout does, so that losses agree on the average only.
    """

    about: str
    make: Callable[[], nn.Module]
    data: Callable[[np.random.Generator, int], Batch]
    batches: tuple[int, ...]
    loss: str = "cross_entropy"
    images: bool = False
    counts: str = "step"
    rate: float = 1e-3
    draws: bool = False


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Returns normal float32 numbers."""
    return rng.normal(size=shape).astype(np.float32)


def labels(rng: np.random.Generator, count: int, classes: int = CLASSES) -> np.ndarray:
    """Returns int64 class labels."""
    return rng.integers(0, classes, count)
