"""The interface of a net."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import nn

__all__ = ["CLASSES", "Batch", "Net", "labels", "normal", "normals", "words"]

CLASSES = 10

Batch = tuple[np.ndarray, np.ndarray]
Data = Callable[[np.random.Generator, int], Batch]


@dataclass(frozen=True)
class Net:
    """A net, its data and its loss.

    Attributes:
        about: what it is, for tables.
        make: makes it.
        data: inputs and target of a batch of a size.
        batches: sizes that are timed.
        loss: "cross_entropy", "mse", or "mean" for the mean of output minus target.
        images: whether its inputs are images, which PyTorch also gets as channels_last.
        counts: what of a step counts: "step", or "update", where the rest is there to make gradients for AdamW.
        rate: learning rate of the steps whose losses are compared.
        draws: whether the net draws random numbers, as dropout does, so that losses agree on the average only.
    """

    about: str
    make: Callable[[], nn.Module]
    data: Data
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


def normals(*shape: int) -> Data:
    """Returns what makes normal inputs of a shape and their labels."""
    return lambda rng, batch: (normal(rng, batch, *shape), labels(rng, batch))


def words(count: int, length: int, per_word: bool = False) -> Data:
    """Returns what makes tokens out of so many words, and a label for each sequence or each token."""

    def data(rng: np.random.Generator, batch: int) -> Batch:
        tokens = rng.integers(0, count, (batch, length))
        return tokens, labels(rng, batch * length, count) if per_word else labels(rng, batch)

    return data
