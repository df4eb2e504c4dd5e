"""Lowers cumulative ops (prefix scans): cumsum, cumprod, logcumsumexp, cummax and cummin.

Of these, opset 21 has only CumSum. The other ops take log2(size) steps: step k combines each element with the element
2^k positions before it. The steps are unrolled if the size is fixed, and otherwise run in a Loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain import functions
from onnxtrain.emitter import Emitter
from onnxtrain.ortmodule.lowering._table import Lowering, is_float, lower
from onnxtrain.ortmodule.lowering.aten._doubling import doubling
from onnxtrain.ortmodule.lowering.aten.pointwise import log_of_sum
from onnxtrain.ortmodule.lowering.aten.shape import arange, axis_of

_MOST_STEPS = 256
"""Longest axis along which a cumulative product is computed position by position."""

_LONG_STEP = 1024
"""Fewest elements per position for which it is: a step then takes longer than ONNX Runtime needs to start it."""


@lower("aten.cumsum.default")
def cumsum(low: Lowering, x: ir.Value, dim: int, *, dtype: Any = None) -> ir.Value:
    x = low.tensor(x, low.dtype)
    return low.op.CumSum(x, low.op.const(axis_of(low, dim))) if low.fake(0).shape else x


@lower("aten.cumprod.default")
def cumprod(low: Lowering, x: ir.Value, dim: int, *, dtype: Any = None) -> ir.Value:
    # ONNX has CumProd from opset 26 on; these graphs are of opset 21. PyTorch multiplies in float64, too.
    wide = ir.DataType.DOUBLE if low.dtype.is_floating_point() else low.dtype
    if low.dtype.is_floating_point() and _has_few_long_steps(low, dim):
        return _product_of_rows(low, low.tensor(x, low.dtype), axis_of(low, dim))
    return _scan(low, low.tensor(x, wide), dim, 1, lambda op, a, b: op.Mul(a, b))


def _has_few_long_steps(low: Lowering, dim: int) -> bool:
    """True if an axis has a fixed size and enough elements per position that one step each is faster than doubling."""
    shape = low.fake(0).shape
    if not shape or not all(isinstance(size, int) for size in shape):
        return False
    size = shape[axis_of(low, dim)]
    return bool(1 < size <= _MOST_STEPS and math.prod(shape) >= size * _LONG_STEP)


def _product_of_rows(low: Lowering, x: ir.Value, axis: int) -> ir.Value:
    """Returns the cumulative product along an axis, one position after the other."""
    op, shape = low.op, list(low.fake(0).shape)
    order = [axis, *(k for k in range(len(shape)) if k != axis)]
    moved = [shape[k] for k in order]
    # ONNX Runtime (1.32) transposes float64 up to 30 times slower than float32.
    rows = op.Reshape(op.Transpose(x, perm=order) if axis else x, [shape[axis], -1])
    product = op.call(functions.cumulative_product, low.tensor(rows, ir.DataType.DOUBLE))
    y = op.Reshape(low.tensor(product, low.dtype), moved)
    return op.Transpose(y, perm=[order.index(k) for k in range(len(shape))]) if axis else y


@lower("aten.logcumsumexp.default")
def logcumsumexp(low: Lowering, x: ir.Value, dim: int) -> ir.Value:
    # Not Log(CumSum(Exp(x))): exp overflows from 89 on in float32.
    return _scan(low, x, dim, -math.inf, log_of_sum)


def _scan(
    low: Lowering,
    x: ir.Value,
    dim: int,
    neutral: float,
    combine: Callable[[Emitter, ir.Value, ir.Value], ir.Value],
) -> ir.Value:
    """Returns the inclusive prefix scan along an axis.

    Args:
        low: the lowering. `x` is the first argument of its node.
        x: any shape.
        dim: the axis.
        neutral: identity element of `combine`, e.g. 1 for products.
        combine: emits the associative operation on two tensors, e.g. Mul.
    """
    rank = low.fake(0).dim()
    if not rank:
        return x
    axis = axis_of(low, dim)
    identity = low.op.const(neutral, like=x)

    # After the step of shift k, each place combines the last 2k elements up to there.
    def step(op: Emitter, shift: ir.Value, state: Sequence[ir.Value]) -> list[ir.Value]:
        pads = op.Concat(shift, op.Neg(shift), axis=0)
        return [combine(op, state[0], op.pad(state[0], pads, [axis], rank, identity))]

    return doubling(low.op, _size(low, x, axis), step, [x])[0]


def _size(low: Lowering, x: ir.Value, axis: int) -> int | ir.Value:
    """Returns the size of an axis of `x`, the node's first argument, as an int, or as an int64 scalar if symbolic."""
    size = low.fake(0).shape[axis]
    return size if isinstance(size, int) else low.op.Squeeze(low.op.dim(x, axis), [0])


@lower("aten.cummax.default", "aten.cummin.default")
def cumulative_extremum(low: Lowering, x: ir.Value, dim: int) -> tuple[ir.Value, ir.Value]:
    op = low.op
    rank = low.fake(0).dim()
    if not rank:
        return op.Identity(x), op.const(0)
    axis = axis_of(low, dim)
    # Only GatherElements at the end has a gradient, for the chosen element alone, as in PyTorch.
    key = op.stop_gradient(x) if is_float(x) else low.tensor(x, ir.DataType.INT64)
    falls = "cummin" in str(low.node.target)
    places = arange(low, op.dim(x, axis))
    behind = list(range(1, rank - axis))
    places = op.Expand(op.Unsqueeze(places, behind) if behind else places, op.shape_of(x))
    places.shape = x.shape

    def before(op: Emitter, shift: ir.Value, value: ir.Value) -> ir.Value:
        """Shifts `value` by `shift` positions towards the end of the axis; its first `shift` elements are repeated."""
        first = op.Slice(value, [0], shift, [axis])
        return op.Concat(first, op.Slice(value, [0], op.Neg(shift), [axis]), axis=axis)

    def step(op: Emitter, shift: ir.Value, state: Sequence[ir.Value]) -> list[ir.Value]:
        (key, place), (old, old_place) = state, [before(op, shift, value) for value in state]
        # Of equal elements PyTorch takes the last one. NaN, which is greater than all numbers, equals NaN.
        better = op.Less(old, key) if falls else op.Greater(old, key)
        if is_float(x):
            better = op.Or(better, op.And(op.IsNaN(old), op.Not(op.IsNaN(key))))
        return [op.Where(better, old, key), op.Where(better, old_place, place)]

    _, indices = doubling(op, _size(low, x, axis), step, [key, places])
    return op.GatherElements(x, indices, axis=axis), indices
