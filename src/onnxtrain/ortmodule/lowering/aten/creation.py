"""Lowers the creation of tensors: full, zeros, arange, linspace, eye, window functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxtrain.ortmodule.lowering._table import Lowering, lower


def _filled(low: Lowering, value: Any, sizes: Any, like: ir.Value | None = None) -> ir.Value:
    """Returns a tensor with the shape of the result, filled with `value`.

    A symbolic shape is computed from `sizes`, or is the shape of `like` if given.
    """
    scalar = low.tensor(value, low.dtype)
    shape = low.result.shape
    if not shape:
        return scalar
    if all(isinstance(size, int) for size in shape):
        return low.op.Expand(scalar, low.op.const(list(shape)))
    return low.op.Expand(scalar, low.op.shape_of(like) if like is not None else low.ints(sizes))


@lower("aten.full.default")
def full(low: Lowering, size: Any, fill_value: Any, **_: Any) -> ir.Value:
    return _filled(low, fill_value, size)


@lower("aten.full_like.default")
def full_like(low: Lowering, x: ir.Value, fill_value: Any, **_: Any) -> ir.Value:
    return _filled(low, fill_value, None, x)


@lower("aten.new_full.default")
def new_full(low: Lowering, x: ir.Value, size: Any, fill_value: Any, **_: Any) -> ir.Value:
    return _filled(low, fill_value, size)


@lower("aten.fill.Scalar", "aten.fill.Tensor")
def fill(low: Lowering, x: ir.Value, value: Any) -> ir.Value:
    return _filled(low, value, None, x)


def _constant_fills(number: int) -> tuple[Callable[..., ir.Value], ...]:
    """Returns lowerings with the signatures of `zeros`, `zeros_like` and `new_zeros` that fill with `number`."""
    return (
        lambda low, size, *_, **__: _filled(low, number, size),
        lambda low, x, **__: _filled(low, number, None, x),
        lambda low, x, size, *_, **__: _filled(low, number, size),
    )


# Elements of `empty` may have any value, e.g. 0.
_EMPTY = ("aten.empty.memory_format", "aten.empty_strided.default")
_NEW_EMPTY = ("aten.new_empty.default", "aten.new_empty_strided.default")
for _number, _names in (
    (0, (("aten.zeros.default", *_EMPTY), ("zeros", "empty"), ("aten.new_zeros.default", *_NEW_EMPTY))),
    (1, (("aten.ones.default",), ("ones",), ("aten.new_ones.default",))),
):
    _sized, _like, _new = _constant_fills(_number)
    lower(*_names[0])(_sized)
    lower(*(f"aten.{name}_like.default" for name in _names[1]))(_like)
    lower(*_names[2])(_new)


@lower("aten.zero.default")
def zero(low: Lowering, x: ir.Value) -> ir.Value:
    return _filled(low, 0, None, x)


@lower("aten.scalar_tensor.default")
def scalar_tensor(low: Lowering, value: Any, **_: Any) -> ir.Value:
    return low.tensor(value, low.dtype)


@lower("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
def arange(low: Lowering, *bounds: Any, **_: Any) -> ir.Value:
    # The overloads are arange(end), arange(start, end) and arange(start, end, step).
    start, end, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    if not any(isinstance(bound, ir.Value) for bound in (start, end, step)):
        numbers = torch.arange(start, end, step, dtype=_numpy_compatible(low.result.dtype)).numpy()
        return low.op.const(numbers, low.dtype)
    integers = all(
        b.dtype == ir.DataType.INT64 if isinstance(b, ir.Value) else isinstance(b, int) for b in bounds
    )
    if not integers:
        # PyTorch computes ranges of floats in float64, regardless of the dtype of the result.
        values = low.op.Range(*(low.tensor(bound, ir.DataType.DOUBLE) for bound in (start, end, step)))
        return low.tensor(values, low.dtype)
    return low.op.Range(*(low.int_scalar(bound) for bound in (start, end, step)))


def _numpy_compatible(dtype: torch.dtype) -> torch.dtype:
    """Returns `dtype`, or float32 for bfloat16, which NumPy lacks."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


@lower("aten.linspace.default", "aten.logspace.default")
def spaced(low: Lowering, start: float, end: float, steps: int, *base: Any, **_: Any) -> ir.Value:
    # All arguments are Python numbers, so the result is a constant.
    function = torch.linspace if "linspace" in str(low.node.target) else torch.logspace
    return low.op.const(
        function(start, end, steps, *base, dtype=_numpy_compatible(low.result.dtype)).numpy(), low.dtype
    )


@lower("aten.eye.default", "aten.eye.m")
def eye(low: Lowering, rows: Any, columns: Any = None, **_: Any) -> ir.Value:
    op = low.op
    columns = rows if columns is None else columns
    if isinstance(rows, int) and isinstance(columns, int):
        return op.const(np.eye(rows, columns), low.dtype)
    # EyeLike takes its shape from a tensor, and there is none.
    row_indices, column_indices = (op.Range(0, low.int_scalar(size), 1) for size in (rows, columns))
    return op.Cast(op.Equal(op.Unsqueeze(row_indices, [1]), column_indices), to=low.dtype)


@lower("aten.tril_indices.default", "aten.triu_indices.default")
def triangle_indices(low: Lowering, rows: int, columns: int, offset: int = 0, **_: Any) -> ir.Value:
    function = torch.tril_indices if "tril" in str(low.node.target) else torch.triu_indices
    return low.op.const(function(rows, columns, offset).numpy(), low.dtype)


_WINDOWS = ("bartlett", "blackman", "hamming", "hann", "kaiser")


@lower(*(f"aten.{name}_window" for name in _WINDOWS))
def window(low: Lowering, size: int, *arguments: Any, **_: Any) -> ir.Value:
    function = getattr(torch, str(low.node.target).split(".")[1])
    return low.op.const(
        function(size, *arguments, dtype=_numpy_compatible(low.result.dtype)).numpy(), low.dtype
    )
