"""Lowers bincount and repeat_interleave, whose result sizes depend on the data."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.ortmodule.lowering._table import Lowering, lower

INT64 = ir.DataType.INT64


def segment_numbers(low: Lowering, starts: ir.Value, count: ir.Value) -> ir.Value:
    """Returns the 1-based segment number of each of the positions 0, 1, ..., count - 1.

    The segment number of a position is the number of `starts` at or before it. For example, starts of [0, 2] and a
    count of 3 result in [1, 1, 2].

    Args:
        low: the lowering.
        starts: the first position of each segment, int64 [n], not greater than `count`.
        count: the number of positions, int64 [1].
    """
    op = low.op
    # One more element, because empty segments may start at `count`.
    zeros = op.Expand(op.const(0), op.Add(count, [1]))
    starts_at = op.ScatterElements(
        zeros, starts, op.Expand(op.const(1), op.Shape(starts)), axis=0, reduction="add"
    )
    return op.Slice(op.CumSum(starts_at, op.const(0)), [0], count, [0])


@lower("aten.repeat_interleave.Tensor")
def repeat_interleave(low: Lowering, repeats: ir.Value, *, output_size: Any = None) -> ir.Value:
    """Lowers to the indices [0] * repeats[0] + [1] * repeats[1] + ..."""
    op = low.op
    low.check(op.GreaterOrEqual(low.tensor(repeats, INT64), 0), "repeats can not be negative")
    ends = op.CumSum(low.tensor(repeats, INT64), op.const(0))
    total = op.ReduceSum(low.tensor(repeats, INT64), [0], keepdims=1)
    if output_size is not None:
        low.check(op.Equal(total, low.ints(output_size)), "allocated size does not match required size")
    return segment_numbers(low, ends, total)


@lower("aten.bincount.default")
def bincount(low: Lowering, x: ir.Value, weights: ir.Value | None = None, minlength: int = 0) -> ir.Value:
    op = low.op
    x = low.tensor(x, INT64)
    low.check(op.GreaterOrEqual(x, 0), "bincount only supports 1-d non-negative integral inputs")
    # -1 stands for the maximum of an empty `x`.
    highest = op.ReduceMax(op.Concat(x, [-1], axis=0), [0], keepdims=1)
    size = op.Max(op.Add(highest, [1]), op.const([minlength]))
    if weights is None:
        weights = op.Expand(op.const(1), op.Shape(x))
    weights = low.tensor(weights, low.dtype)
    zeros = op.Expand(low.tensor(0, low.dtype), size)
    return op.ScatterElements(zeros, x, weights, axis=0, reduction="add")
