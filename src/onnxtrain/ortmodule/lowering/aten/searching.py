"""Lowers unique, searchsorted, isin and histc."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.ortmodule.lowering._table import Lowering, is_float, lower
from onnxtrain.ortmodule.lowering.aten._doubling import doubling
from onnxtrain.ortmodule.lowering.aten.comparison import promoted
from onnxtrain.ortmodule.lowering.aten.order import SMALL_INTEGERS, ordered_topk


@lower("aten._unique2.default")
def unique(
    low: Lowering, x: ir.Value, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[ir.Value, ...]:
    op = low.op
    if is_float(x):
        return _unique_floats(low, x)
    # ONNX Runtime's Unique takes float32, float64, int64 and int8.
    if x.dtype == ir.DataType.BOOL or x.dtype in SMALL_INTEGERS or x.dtype == ir.DataType.INT32:
        x = low.tensor(x, ir.DataType.INT64)
    # PyTorch sorts even with sorted=False.
    values, _, inverse, counts = op.Unique(op.Reshape(x, [-1]), sorted=1, _outputs=4)
    if low.fake(0).dim() != 1:
        inverse = op.reshape_like(inverse, x)
    return values, inverse, counts


def _unique_floats(low: Lowering, x: ir.Value) -> tuple[ir.Value, ...]:
    """Lowers `unique` for a floating-point tensor. ONNX Runtime's Unique (1.32) loses numbers if there are NaNs.

    Returns:
        The sorted distinct numbers, the index of each element of `x` among them, and the number of occurrences.
    """
    op = low.op
    flat = op.Reshape(x, [-1])
    size = op.Shape(flat)
    ordered, order = ordered_topk(low, flat, size, 0, False)
    # Where a number differs from the one before it. As in PyTorch, NaN differs from NaN.
    changes = op.Not(op.Equal(op.Slice(ordered, [1], size), op.Slice(ordered, [0], [-1])))
    changes = op.Slice(op.Concat(op.const([True]), changes, axis=0), [0], size)
    place = op.Sub(op.CumSum(op.Cast(changes, to=ir.DataType.INT64), op.const(0)), [1])
    zeros = op.Expand(op.const(0), size)
    inverse = op.ScatterElements(zeros, order, place, axis=0)
    values = op.Compress(ordered, changes, axis=0)
    ones = op.Expand(op.const(1), size)
    counts = op.ScatterElements(
        op.Expand(op.const(0), op.Shape(values)), place, ones, axis=0, reduction="add"
    )
    return values, op.reshape_like(inverse, x) if low.fake(0).dim() != 1 else inverse, counts


@lower("aten.searchsorted.Tensor", "aten.searchsorted.Scalar")
def searchsorted(
    low: Lowering,
    ordered: ir.Value,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: ir.Value | None = None,
) -> ir.Value:
    """Lowers `torch.searchsorted` to a bisection along the last axis of `ordered`, for all values at once."""
    op = low.op
    if sorter is not None:
        ordered = op.GatherElements(ordered, sorter, axis=-1)
    values = low.tensor(values, ordered.dtype or low.dtype)
    size = low.fake(0).shape[-1]
    length = op.Squeeze(op.dim(ordered, len(low.fake(0).shape) - 1), [0])
    # Of 2-D tensors and more, each row is searched for the values of its own row.
    one_row, is_right = len(low.fake(0).shape) == 1, right or side == "right"

    def is_beyond(op: Emitter, place: ir.Value) -> ir.Value:
        found = op.Gather(ordered, place) if one_row else op.GatherElements(ordered, place, axis=-1)
        # As PyTorch compares, so that NaN comes last.
        return op.Greater(found, values) if is_right else op.GreaterOrEqual(found, values)

    return _first_place(low, size, length, op.shape_of(values), is_beyond)


def _first_place(
    low: Lowering,
    size: Any,
    length: ir.Value,
    shape: ir.Value,
    is_beyond: Callable[[Emitter, ir.Value], ir.Value],
) -> ir.Value:
    """Returns the first of `size` positions at which a condition is true, found by bisection.

    The result is `size` where the condition is true at no position.

    Args:
        low: the lowering.
        size: number of positions, an int or a symbol.
        length: the same number as an ONNX value, int64 [].
        shape: shape of the result, int64 vector.
        is_beyond: emits the condition for positions of the result's shape. If it is true at a position, it must be true
            at all later positions.
    """
    op = low.op
    start = op.Expand(op.const(0), shape)
    end = op.Add(start, length)

    def halve(op: Emitter, shift: ir.Value, bounds: Sequence[ir.Value]) -> list[ir.Value]:
        start, end = bounds
        middle = op.Div(op.Add(start, end), op.const(2))
        # After a search has ended, `middle` may be past the last element.
        beyond = is_beyond(op, op.Min(middle, op.Sub(length, op.const(1))))
        behind = op.And(op.Not(beyond), op.Less(start, end))
        return [op.Where(behind, op.Add(middle, op.const(1)), start), op.Where(behind, end, middle)]

    # There are size + 1 results.
    limit = size + 1 if isinstance(size, int) else op.Add(length, op.const(1))
    return doubling(op, limit, halve, [start, end])[0]


_FEW = 16
"""Up to this many numbers, `isin` compares with each of them."""


@lower("aten.isin.Tensor_Tensor")
def isin(
    low: Lowering, x: ir.Value, among: ir.Value, *, assume_unique: bool = False, invert: bool = False
) -> ir.Value:
    op = low.op
    values, numbers = promoted(low, x, among)
    count = low.fake(1).numel()
    if isinstance(count, int) and count <= _FEW:
        # Compares each pair: [*x.shape, count].
        equal = op.Equal(op.Unsqueeze(values, [-1]), op.Reshape(numbers, [-1]))
        # ReduceSum, because ReduceMax of an empty `among` is undefined.
        is_in = op.Greater(op.ReduceSum(op.Cast(equal, to=ir.DataType.FLOAT), [-1], keepdims=0), 0.0)
        return op.Not(is_in) if invert else is_in
    if values.dtype in SMALL_INTEGERS:
        values, numbers = low.tensor(values, ir.DataType.INT32), low.tensor(numbers, ir.DataType.INT32)
    flat = op.Reshape(numbers, [-1])
    size = op.Shape(flat)
    length = op.Squeeze(size, [0])
    ordered, _ = ordered_topk(low, flat, size, 0, False)
    # One more element, because there may be none.
    ordered = op.Concat(ordered, op.const([0], ordered.dtype or low.dtype), axis=0)

    def is_beyond(op: Emitter, place: ir.Value) -> ir.Value:
        found = op.Gather(ordered, place)
        beyond = op.GreaterOrEqual(found, values)
        return op.Or(beyond, op.IsNaN(found)) if is_float(values) else beyond

    place = _first_place(low, count, length, op.shape_of(values), is_beyond)
    is_in = op.And(op.Less(place, length), op.Equal(op.Gather(ordered, place), values))
    return op.Not(is_in) if invert else is_in


@lower("aten.histc.default")
def histc(low: Lowering, x: ir.Value, bins: int = 100, min: Any = 0, max: Any = 0) -> ir.Value:
    """Lowers `torch.histc`: counts the elements in `bins` equal-width bins from `min` to `max`.

    The last bin includes `max`. Elements outside the range, and NaN, are not counted.

    Raises:
        UnsupportedATenOp: `min` equals `max`, so PyTorch would take the range from the data.
    """
    op = low.op
    if min == max:
        raise low.unsupported("a range that depends on the data")
    flat = op.Reshape(x, [-1])
    bin_of_each = op.Floor(op.Div(op.Mul(op.Sub(flat, float(min)), float(bins)), float(max) - float(min)))
    # The last one counts elements out of range, and NaN.
    inside = op.And(op.GreaterOrEqual(flat, float(min)), op.LessOrEqual(flat, float(max)))
    bin_of_each = op.Where(inside, op.Min(bin_of_each, op.const(float(bins - 1), like=x)), float(bins))
    places = op.Cast(bin_of_each, to=ir.DataType.INT64)
    counts = op.ScatterElements(
        op.Expand(op.const(0), op.const([bins + 1])),
        places,
        op.Expand(op.const(1), op.Shape(places)),
        axis=0,
        reduction="add",
    )
    return op.Cast(op.Slice(counts, [0], [bins], [0]), to=low.dtype)
