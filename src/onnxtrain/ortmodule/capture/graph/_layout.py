"""Find the memory layout of the outputs of a captured graph: whether `y.view(-1)` works depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from onnxtrain.ortmodule.capture._nodes import is_plain

Layout = tuple[int, ...]
"""The axes of a tensor from the slowest in memory to the fastest, e.g. (0, 2, 3, 1) for channels_last."""


def layout_of(fake: Any) -> Layout | None:
    """Returns the layout of a fake tensor; None if it is contiguous, has gaps or overlaps, or is no plain tensor."""
    if not isinstance(fake, torch.Tensor) or not is_plain(fake):
        return None
    sizes, strides = _hints(fake.shape), _hints(fake.stride())
    if sizes is None or strides is None:
        return None
    # Axes of size 1 have strides without meaning: they come first.
    order = tuple(sorted(range(len(sizes)), key=lambda axis: (sizes[axis] != 1, -strides[axis])))
    # Without gaps, the stride of an axis is the number of elements of all faster axes.
    length = 1
    for axis in reversed(order):
        if sizes[axis] != 1 and strides[axis] != length:
            return None
        length *= sizes[axis]
    wide = [axis for axis in order if sizes[axis] != 1]
    return None if length == 0 or wide == sorted(wide) else order


def _hints(sizes: Sequence[Any]) -> list[int] | None:
    """Returns sizes or strides as numbers, those of this call for symbolic ones; None if one is not known."""
    # Comparing the symbols themselves would guard the graph: another size would capture another graph.
    found = [size if isinstance(size, int) else size.node.hint for size in sizes]
    return found if all(isinstance(size, int) for size in found) else None
