"""Determines the memory layout of the outputs of a captured graph. Whether `y.view(-1)` works depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from onnxtrain.ortmodule.capture._nodes import is_plain

Layout = tuple[int, ...]
"""The axes of a tensor in memory order, slowest first, e.g. (0, 2, 3, 1) for channels_last."""


def layout_of(fake: Any) -> Layout | None:
    """Returns the layout of a fake tensor that is dense but not contiguous.

    Returns:
        The layout. None if `fake` is contiguous, has gaps or overlapping elements, or is not a plain tensor.
    """
    if not isinstance(fake, torch.Tensor) or not is_plain(fake):
        return None
    sizes, strides = _hints(fake.shape), _hints(fake.stride())
    if sizes is None or strides is None:
        return None
    # The strides of axes of size 1 are arbitrary: these axes come first.
    order = tuple(sorted(range(len(sizes)), key=lambda axis: (sizes[axis] != 1, -strides[axis])))
    # In a dense tensor, the stride of an axis is the product of the sizes of all faster axes.
    length = 1
    for axis in reversed(order):
        if sizes[axis] != 1 and strides[axis] != length:
            return None
        length *= sizes[axis]
    wide = [axis for axis in order if sizes[axis] != 1]
    return None if length == 0 or wide == sorted(wide) else order


def _hints(sizes: Sequence[Any]) -> list[int] | None:
    """Returns sizes or strides as numbers, with each symbol replaced by its hint; None if a symbol has no hint."""
    # Comparing the symbols themselves would add guards, and each size would be captured separately.
    found = [size if isinstance(size, int) else size.node.hint for size in sizes]
    return found if all(isinstance(size, int) for size in found) else None
