"""Lowers functionalized writes to views: `x[a:b] = source` becomes `slice_scatter`, which returns the whole tensor."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from onnxtrain.ortmodule.lowering._table import Lowering, lower, same_sizes
from onnxtrain.ortmodule.lowering.aten.shape import arange, axis_of, sliced, transposed


@lower("aten.slice_scatter.default")
def slice_scatter(
    low: Lowering,
    x: ir.Value,
    source: ir.Value,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> ir.Value:
    """Lowers to a Concat of source and the parts before and after the slice, or to a ScatterND if `step` is not 1."""
    axis = axis_of(low, dim)
    source = low.tensor(source, low.dtype)
    size, count = low.fake(0).shape[axis], low.fake(1).shape[axis]
    fits = False
    if not isinstance(start, ir.Value) and not isinstance(end, ir.Value):
        expected = torch.ops.aten.slice.Tensor(low.fake(0), axis, start, end, step).shape[axis]
        if statically_known_true(expected != count):
            raise low.unsupported(f"{count} rows for a slice of {expected}")
        fits = statically_known_true(expected == count)
    if step == 1 and str(size) == str(count):
        return source
    if step != 1:
        return _write_strided(low, x, source, axis, 0 if start is None else start, step)
    to_the_end = end is None or (isinstance(end, int) and isinstance(size, int) and end >= size)
    written = _write_contiguous(low, x, source, axis, 0 if start is None else start, to_the_end)
    if not fits:
        _check_size(low, x, written, axis)
    return written


def _check_size(low: Lowering, x: ir.Value, written: ir.Value, axis: int) -> None:
    """Adds a run-time check that `written`, the result of a write to `x`, has the size of `x` along an axis.

    The sizes differ if the source doesn't fit the slice, e.g. for 4 rows written to `x[8:12]` of 10 rows.
    """
    size, after = (low.op.Shape(value, start=axis, end=axis + 1) for value in (x, written))
    low.check(low.op.Equal(size, after), "the written values differ in size from the slice")


def _write_contiguous(
    low: Lowering, x: ir.Value, source: ir.Value, axis: int, start: Any, to_the_end: bool
) -> ir.Value:
    """Returns a copy of `x` in which the slice `start : start + len(source)` along an axis is replaced with `source`.

    Args:
        low: the lowering.
        x: the tensor.
        source: the new elements.
        axis: the axis of the slice.
        start: the first index of the slice, possibly symbolic or negative.
        to_the_end: True if the slice is known to end at the end of the axis.
    """
    op = low.op
    start = _non_negative_start(low, x, axis, start)
    parts = [source]
    if not isinstance(start, int) or start > 0:
        parts.insert(0, sliced(low, x, axis, 0, start))
    if not to_the_end:
        count = low.fake(1).shape[axis] if low.fake(1).dim() == low.fake(0).dim() else 1
        end: ir.Value | int
        if not isinstance(start, int) or not isinstance(count, int):
            end = op.Add(op.Reshape(low.int_scalar(start), [1]), op.dim(source, axis))
        else:
            end = start + count
        parts.append(sliced(low, x, axis, end, None))
    return op.Concat(*parts, axis=axis) if len(parts) > 1 else source


def _non_negative_start(low: Lowering, x: ir.Value, axis: int, start: Any) -> Any:
    """Returns the start of a slice along an axis of `x` as a non-negative index.

    Args:
        low: the lowering. The first argument of its node has the shape of `x`.
        x: the tensor.
        axis: the axis of the slice.
        start: the first index, possibly symbolic. A negative index counts from the end of the axis.

    Returns:
        An int if `start` is an int and either non-negative or an index into an axis of fixed size. Otherwise an int64
        scalar, at most the size of the axis.
    """
    op = low.op
    size = low.fake(0).shape[axis]
    if isinstance(start, int) and (isinstance(size, int) or start >= 0):
        return max(start + size, 0) if start < 0 else start
    length, start = op.Squeeze(op.dim(x, axis), [0]), low.int_scalar(start)
    start = op.Where(op.Less(start, op.const(0)), op.Max(op.Add(start, length), op.const(0)), start)
    return op.Min(start, length)


def _write_strided(
    low: Lowering, x: ir.Value, source: ir.Value, axis: int, start: Any, step: int
) -> ir.Value:
    """Returns a copy of `x` in which elements of `x[start::step]` along an axis are replaced with `source`.

    If `source` is shorter than the slice, the remaining elements are not replaced.
    """
    op = low.op
    start = _non_negative_start(low, x, axis, start)
    count = op.Squeeze(op.dim(source, axis), [0])
    indices = op.Add(op.Mul(op.Range(0, count, 1), low.int_scalar(step)), low.int_scalar(start))
    rank = len(low.fake(0).shape)
    order = [axis, *(i for i in range(rank) if i != axis)]
    written = op.ScatterND(
        transposed(low, x, order), op.Unsqueeze(indices, [1]), transposed(low, source, order)
    )
    return transposed(low, written, [order.index(i) for i in range(rank)])


@lower("aten.select_scatter.default")
def select_scatter(low: Lowering, x: ir.Value, source: ir.Value, dim: int, index: Any) -> ir.Value:
    axis = axis_of(low, dim)
    row = low.op.Unsqueeze(low.tensor(source, low.dtype), [axis])
    size = low.fake(0).shape[axis]
    in_range = False
    if not isinstance(index, ir.Value):
        if statically_known_true(index >= size) or statically_known_true(index < -size):
            raise low.unsupported(f"index {index} of {size}")
        in_range = statically_known_true(index < size) and statically_known_true(index >= -size)
    is_last = isinstance(index, int) and (index == -1 or (isinstance(size, int) and index % size == size - 1))
    written = _write_contiguous(low, x, row, axis, index, is_last)
    if not in_range:
        _check_size(low, x, written, axis)
        if not isinstance(index, int) or index < 0:
            low.check(
                low.op.GreaterOrEqual(low.op.Add(low.op.dim(x, axis), low.int_scalar(index)), 0),
                "index out of range",
            )
    return written


@lower("aten.diagonal_scatter.default")
def diagonal_scatter(
    low: Lowering, x: ir.Value, source: ir.Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> ir.Value:
    shape = low.fake(0).shape
    axes = [axis_of(low, dim1), axis_of(low, dim2)]
    # Row and column of the first element of the diagonal.
    first = low.op.const([[max(-offset, 0), max(offset, 0)]])
    indices = low.op.Add(low.op.Unsqueeze(arange(low, low.op.dim(source, -1)), [1]), first)
    order = [*axes, *(i for i in range(len(shape)) if i not in axes)]
    last = len(shape) - 2
    updates = transposed(low, low.tensor(source, low.dtype), [last, *range(last)])
    written = low.op.ScatterND(transposed(low, x, order), indices, updates)
    return transposed(low, written, [order.index(i) for i in range(len(shape))])


@lower("aten.copy.default")
def copy(low: Lowering, x: ir.Value, source: ir.Value, non_blocking: bool = False) -> ir.Value:
    source = low.tensor(source, low.dtype)
    if same_sizes(low.fake(0), low.fake(1)):
        return source
    return low.op.Expand(source, low.op.shape_of(x))
