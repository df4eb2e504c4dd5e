"""Read from a captured graph how its outputs lie in memory: what they can be viewed as depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from onnxtrain.ortmodule.capture._fakes import is_plain

Layout = tuple[int, ...]
"""The axes of a tensor from the slowest in memory to the fastest."""


def layout_of(fake: Any) -> Layout | None:
    """Returns how a fake tensor lies in memory; None where it is contiguous or has gaps, and for other values."""
    if not isinstance(fake, torch.Tensor) or not is_plain(fake):
        return None
    sizes, strides = _hints(fake.shape), _hints(fake.stride())
    if sizes is None or strides is None:
        return None
    order = tuple(sorted(range(len(sizes)), key=lambda axis: (sizes[axis] != 1, -strides[axis])))
    length = 1
    for axis in reversed(order):
        if sizes[axis] != 1 and strides[axis] != length:
            return None
        length *= sizes[axis]
    wide = [axis for axis in order if sizes[axis] != 1]
    return None if length == 0 or wide == sorted(wide) else order


def _hints(sizes: Sequence[Any]) -> list[int] | None:
    """The numbers of this call: to compare symbols would bind the graph to what was found."""
    found = [size if isinstance(size, int) else size.node.hint for size in sizes]
    return found if all(isinstance(size, int) for size in found) else None
