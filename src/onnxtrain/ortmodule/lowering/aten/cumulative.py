"""Lowers cumulative ops: the result at each place combines the elements up to there.

ONNX of this opset has CumSum only. The other ops take one of two ways. Where the size of the axis is known, log2(size)
steps combine each element with the element 1, 2, 4, ... places before. Otherwise each prefix becomes a row of its own
and the rows are reduced, in memory of the square of the size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.ortmodule.lowering._table import Lowering, is_float, lower
from onnxtrain.ortmodule.lowering.aten.pointwise import logaddexp
from onnxtrain.ortmodule.lowering.aten.shape import arange, axis_of


@lower("aten.cumsum.default")
def cumsum(low: Lowering, x: ir.Value, dim: int, *, dtype: Any = None) -> ir.Value:
    x = low.tensor(x, low.dtype)
    return low.op.CumSum(x, low.op.const(axis_of(low, dim))) if low.fake(0).shape else x


@lower("aten.cumprod.default")
def cumprod(low: Lowering, x: ir.Value, dim: int, *, dtype: Any = None) -> ir.Value:
    # ONNX has CumProd from opset 26 on; these graphs are of opset 21.
    return _scanned(low, low.tensor(x, low.dtype), dim, 1, low.op.Mul, "ReduceProd")


@lower("aten.logcumsumexp.default")
def logcumsumexp(low: Lowering, x: ir.Value, dim: int) -> ir.Value:
    # Not Log(CumSum(Exp(x))): exp overflows from 89 on in float32.
    return _scanned(low, x, dim, -math.inf, lambda a, b: logaddexp(low, a, b), "ReduceLogSumExp")


def _scanned(
    low: Lowering,
    x: ir.Value,
    dim: int,
    neutral: float,
    combine: Callable[[ir.Value, ir.Value], ir.Value],
    reduction: str,
) -> ir.Value:
    """Combines all elements up to each place along an axis.

    Args:
        low: the lowering; the first argument of its node is `x`.
        x: any shape.
        dim: the axis.
        neutral: the number that `combine` leaves out, e.g. 1 for products.
        combine: the associative operation on two tensors, e.g. `op.Mul`.
        reduction: the ONNX op that combines all elements along an axis, e.g. "ReduceProd".
    """
    rank = low.fake(0).dim()
    if not rank:
        return x
    axis = axis_of(low, dim)
    size = low.fake(0).shape[axis]
    identity = low.tensor(neutral, low.dtype)
    # A symbolic size has no known number of steps.
    if not isinstance(size, int):
        rows = low.op.Where(_prefixes(low, x, axis, rank), low.op.Unsqueeze(x, [axis]), identity)
        return low.op.emit(reduction, rows, [axis + 1], keepdims=0)
    # After the step of shift k, each place combines the last 2k elements up to there.
    shift = 1
    while shift < size:
        x = combine(x, low.op.pad(x, [shift, -shift], [axis], rank, identity))
        shift *= 2
    return x


def _prefixes(low: Lowering, x: ir.Value, axis: int, rank: int) -> ir.Value:
    """Returns a mask bool [size, size, 1, ...] whose row i is true up to place i, to broadcast to rows of `x`."""
    op = low.op
    places = arange(low, low.op.dim(x, axis))
    prefix = op.LessOrEqual(places, op.Unsqueeze(places, [1]))
    behind = list(range(2, rank - axis + 1))
    return op.Unsqueeze(prefix, behind) if behind else prefix


@lower("aten.cummax.default", "aten.cummin.default")
def cumulative_extremum(low: Lowering, x: ir.Value, dim: int) -> tuple[ir.Value, ir.Value]:
    op = low.op
    rank = low.fake(0).dim()
    if not rank:
        return op.Identity(x), op.const(0)
    axis = axis_of(low, dim)
    prefix = _prefixes(low, x, axis, rank)
    key = x if is_float(x) else low.tensor(x, ir.DataType.INT64)
    if "cummin" in str(low.node.target):
        key = op.Neg(key)
    if not is_float(x):
        smallest = op.const(np.iinfo(np.int64).min)
        rows = op.Where(prefix, op.Unsqueeze(key, [axis]), smallest)
        indices = op.ArgMax(rows, axis=axis + 1, keepdims=0, select_last_index=1)
        return op.GatherElements(x, indices, axis=axis), indices
    # Only GatherElements at the end has a gradient, for the chosen element alone, as in PyTorch.
    key = low.op.stop_gradient(key)
    places = arange(low, low.op.dim(x, axis))
    behind = list(range(1, rank - axis))
    column = op.Unsqueeze(places, behind) if behind else places
    # PyTorch takes NaN for the greatest number, and among equal elements the last one.
    nans = op.Where(op.IsNaN(key), column, op.const(-1))
    last_nan = op.ReduceMax(
        op.Where(prefix, op.Unsqueeze(nans, [axis]), op.const(-1)), [axis + 1], keepdims=0
    )
    rows = op.Where(prefix, op.Unsqueeze(key, [axis]), op.const(-math.inf, like=key))
    rows = op.Where(op.IsNaN(rows), op.const(-math.inf, like=key), rows)
    indices = op.ArgMax(rows, axis=axis + 1, keepdims=0, select_last_index=1)
    # In a row of -inf alone ArgMax finds the last place of the axis, which lies behind the prefix.
    indices = op.Min(indices, column)
    indices = op.Where(op.GreaterOrEqual(last_nan, op.const(0)), last_nan, indices)
    return op.GatherElements(x, indices, axis=axis), indices
