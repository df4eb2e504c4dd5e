"""Lowers cumulative ops (prefix scans): cumsum, cumprod, logcumsumexp, cummax and cummin.

Opset 21 has only CumSum. For an axis of fixed size, cumprod and logcumsumexp are lowered to log2(size) steps, which
combine each element with the one 1, 2, 4, ... positions before it. Otherwise, and for cummax and cummin, all prefixes
are materialized as rows and reduced, which takes quadratic memory.
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
    # ONNX has CumProd since opset 26 only.
    return _scan(low, low.tensor(x, low.dtype), dim, 1, low.op.Mul, "ReduceProd")


@lower("aten.logcumsumexp.default")
def logcumsumexp(low: Lowering, x: ir.Value, dim: int) -> ir.Value:
    # Not Log(CumSum(Exp(x))), because Exp overflows for x >= 89 in float32.
    return _scan(low, x, dim, -math.inf, lambda a, b: logaddexp(low, a, b), "ReduceLogSumExp")


def _scan(
    low: Lowering,
    x: ir.Value,
    dim: int,
    neutral: float,
    combine: Callable[[ir.Value, ir.Value], ir.Value],
    reduction: str,
) -> ir.Value:
    """Returns the inclusive prefix scan along an axis.

    Args:
        low: the lowering. `x` is the first argument of its node.
        x: any shape.
        dim: the axis.
        neutral: the neutral element of `combine`, e.g. 1 for a product.
        combine: an associative binary operation, e.g. `op.Mul`.
        reduction: the ONNX op that reduces by `combine`, e.g. "ReduceProd".
    """
    rank = low.fake(0).dim()
    if not rank:
        return x
    axis = axis_of(low, dim)
    size = low.fake(0).shape[axis]
    identity = low.tensor(neutral, low.dtype)
    if not isinstance(size, int):
        rows = low.op.Where(_prefix_mask(low, x, axis, rank), low.op.Unsqueeze(x, [axis]), identity)
        return low.op.emit(reduction, rows, [axis + 1], keepdims=0)
    # After the step with shift k, each position combines the last 2k elements.
    shift = 1
    while shift < size:
        x = combine(x, low.op.pad(x, [shift, -shift], [axis], rank, identity))
        shift *= 2
    return x


def _prefix_mask(low: Lowering, x: ir.Value, axis: int, rank: int) -> ir.Value:
    """Returns the lower triangular mask, bool [size, size, 1, ...], that selects the first i + 1 elements for row i.

    It broadcasts to `x` with a new axis for the rows, inserted at `axis`.
    """
    op = low.op
    positions = arange(low, low.op.dim(x, axis))
    mask = op.LessOrEqual(positions, op.Unsqueeze(positions, [1]))
    trailing = list(range(2, rank - axis + 1))
    return op.Unsqueeze(mask, trailing) if trailing else mask


@lower("aten.cummax.default", "aten.cummin.default")
def cumulative_extremum(low: Lowering, x: ir.Value, dim: int) -> tuple[ir.Value, ir.Value]:
    op = low.op
    rank = low.fake(0).dim()
    if not rank:
        return op.Identity(x), op.const(0)
    axis = axis_of(low, dim)
    mask = _prefix_mask(low, x, axis, rank)
    key = x if is_float(x) else low.tensor(x, ir.DataType.INT64)
    if "cummin" in str(low.node.target):
        key = op.Neg(key)
    if not is_float(x):
        smallest = op.const(np.iinfo(np.int64).min)
        rows = op.Where(mask, op.Unsqueeze(key, [axis]), smallest)
        indices = op.ArgMax(rows, axis=axis + 1, keepdims=0, select_last_index=1)
        return op.GatherElements(x, indices, axis=axis), indices
    # Only the final GatherElements passes a gradient, to the selected element alone, as in PyTorch.
    key = low.op.stop_gradient(key)
    positions = arange(low, low.op.dim(x, axis))
    trailing = list(range(1, rank - axis))
    column = op.Unsqueeze(positions, trailing) if trailing else positions
    # PyTorch returns the last of several NaNs, or of equal elements.
    nans = op.Where(op.IsNaN(key), column, op.const(-1))
    last_nan = op.ReduceMax(op.Where(mask, op.Unsqueeze(nans, [axis]), op.const(-1)), [axis + 1], keepdims=0)
    rows = op.Where(mask, op.Unsqueeze(key, [axis]), op.const(-math.inf, like=key))
    rows = op.Where(op.IsNaN(rows), op.const(-math.inf, like=key), rows)
    indices = op.ArgMax(rows, axis=axis + 1, keepdims=0, select_last_index=1)
    # If all elements of a prefix are -inf, ArgMax returns the last index of the row, which is past the prefix.
    indices = op.Min(indices, column)
    indices = op.Where(op.GreaterOrEqual(last_nan, op.const(0)), last_nan, indices)
    return op.GatherElements(x, indices, axis=axis), indices
