"""Compares and reads sizes, which are numbers or symbols."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

Dims = tuple[int | str, ...]
"""Sizes of a value: numbers, and names of symbolic sizes."""


def dims_of(value: ir.Value) -> Dims | None:
    """Returns the sizes of a value, as numbers and names; None if one is unknown."""
    if value.shape is None:
        return None
    dims = tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)
    return None if None in dims else dims  # type: ignore[return-value]


def same_size(a: object, b: object) -> bool:
    """True if two sizes are known to be equal. Unnamed symbolic sizes never are."""
    return a == b and a is not None and not (isinstance(a, ir.SymbolicDim) and a.value is None)


def broadcasts_to(dims: Sequence[object], sizes: Sequence[object]) -> bool:
    """True if a tensor with sizes `dims` is known to broadcast to `sizes`."""
    pairs = zip(reversed(dims), reversed(sizes), strict=False)
    return len(dims) <= len(sizes) and all(dim == 1 or same_size(dim, size) for dim, size in pairs)
