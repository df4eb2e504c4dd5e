"""Lowers reductions: sum, mean, prod, any, var, norms, logsumexp."""

from __future__ import annotations

import functools
import math
from typing import Any

import onnx_ir as ir
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from onnxtrain.ortmodule.lowering._table import Lowering, lower
from onnxtrain.ortmodule.lowering.aten.comparison import as_bool
from onnxtrain.ortmodule.lowering.aten.order import axes_of
from onnxtrain.ortmodule.lowering.aten.shape import transposed


def _reduce(low: Lowering, op_type: str, x: ir.Value, dim: Any, keepdim: bool) -> ir.Value:
    """Reduces `x` with an ONNX op, e.g. "ReduceSum". `dim` is PyTorch's argument."""
    axes = axes_of(low, dim)
    return low.op.emit(op_type, x, axes, keepdims=int(keepdim))


def reduce_mean(low: Lowering, x: ir.Value, axes: list[int] | None, keepdim: bool) -> ir.Value:
    """Returns the mean of `x` over `axes`, which is NaN if there are no elements, as in PyTorch.

    Args:
        low: the lowering. The first argument of its node must have the shape of `x`.
        x: the tensor.
        axes: the axes to reduce, or None for all axes.
        keepdim: True to keep the reduced axes with size 1.
    """
    if low.has_no_elements(0):
        # The mean of no elements is NaN in PyTorch, and 0 in ONNX Runtime.
        return low.op.Div(low.op.ReduceSum(x, axes, keepdims=int(keepdim)), 0.0)
    shape = low.fake(0).shape
    reduced = range(len(shape)) if axes is None else axes
    if any(free_unbacked_symbols(shape[axis]) for axis in reduced):
        # There may be no elements, depending on the data, e.g. in `x[mask].mean()`.
        count = functools.reduce(low.op.Mul, (low.op.dim(x, axis % len(shape)) for axis in reduced))
        total = low.op.ReduceSum(x, axes, keepdims=int(keepdim))
        return low.op.Div(total, low.op.CastLike(low.op.Squeeze(count, [0]), x))
    return low.op.ReduceMean(x, axes, keepdims=int(keepdim))


@lower("aten.mean.dim", "aten.mean.default")
def mean(low: Lowering, x: ir.Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> ir.Value:
    return reduce_mean(low, low.tensor(x, low.dtype), axes_of(low, dim), keepdim)


@lower("aten.sum.dim_IntList", "aten.sum.default")
def sum_(low: Lowering, x: ir.Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> ir.Value:
    if low.dtype.is_integer() and x.dtype not in _COUNTED:
        return _integer_sum(low, low.tensor(x, ir.DataType.INT64), axes_of(low, dim), keepdim)
    return _reduce(low, "ReduceSum", low.tensor(x, low.dtype), dim, keepdim)


_COUNTED = (ir.DataType.BOOL, ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.INT16)
"""Dtypes so small that the sum of any tensor is below 2^53."""


def _integer_sum(low: Lowering, x: ir.Value, axes: list[int] | None, keepdim: bool) -> ir.Value:
    """Returns the sum of int64 numbers modulo 2^64, as PyTorch computes it.

    ONNX Runtime's ReduceSum (1.32) adds integers in float64, so 2^53 + 1 becomes 2^53. Its integer MatMul is exact.
    """
    op, rank = low.op, len(low.fake(0).shape)
    axes = list(range(rank)) if axes is None else axes
    if not axes:
        return x
    if low.has_no_elements(0):
        return op.ReduceSum(x, axes, keepdims=int(keepdim))
    kept = [axis for axis in range(rank) if axis not in axes]
    rows = transposed(low, x, [*kept, *axes])
    if len(axes) > 1:
        rows = op.Reshape(rows, op.const([0] * len(kept) + [-1]))
    ones = op.Expand(op.const(1), op.Shape(rows, start=-1))
    total = op.MatMul(rows, ones)
    return op.Unsqueeze(total, sorted(axes)) if keepdim else total


@lower("aten.prod.dim_int", "aten.prod.default")
def prod(low: Lowering, x: ir.Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> ir.Value:
    if low.dtype.is_integer():
        return _integer_product(low, low.tensor(x, ir.DataType.INT64), axes_of(low, dim), keepdim)
    return _reduce(low, "ReduceProd", low.tensor(x, low.dtype), dim, keepdim)


def _integer_product(low: Lowering, x: ir.Value, axes: list[int] | None, keepdim: bool) -> ir.Value:
    """Returns the product of int64 numbers modulo 2^64, as PyTorch computes it."""
    op, shape = low.op, low.fake(0).shape
    axes = list(range(len(shape))) if axes is None else axes
    for axis in axes:
        size = shape[axis]
        if not isinstance(size, int):
            raise low.unsupported(
                "a product of an unknown number of integers, which ONNX Runtime rounds to float64"
            )
        if size == 0:
            return op.ReduceProd(x, axes, keepdims=int(keepdim))
        # Products of pairs, until one is left.
        while size > 1:
            half = size // 2
            pairs = op.Mul(op.Slice(x, [0], [half], [axis]), op.Slice(x, [half], [2 * half], [axis]))
            rest = [op.Slice(x, [2 * half], [size], [axis])] if size % 2 else []
            x, size = op.Concat(pairs, *rest, axis=axis) if rest else pairs, size - half
    return x if keepdim or not axes else op.Squeeze(x, axes)


@lower("aten.any", "aten.all", "aten._is_any_true.default", "aten._is_all_true.default")
def any_or_all(low: Lowering, x: ir.Value, dim: Any = None, keepdim: bool = False) -> ir.Value:
    is_any = "any" in str(low.node.target)
    # ONNX Runtime 1.21 to 1.28 crashes on ReduceMax and ReduceMin of no elements.
    if low.has_no_elements(0):
        count = _reduce(low, "ReduceSum", low.tensor(x, ir.DataType.INT64), dim, keepdim)
        return low.op.Not(low.op.Equal(count, 0)) if is_any else low.op.Equal(count, 0)
    return _reduce(low, "ReduceMax" if is_any else "ReduceMin", as_bool(low, x), dim, keepdim)


def _variance(
    low: Lowering, x: ir.Value, dim: Any, correction: float | None, keepdim: bool
) -> tuple[ir.Value, ir.Value]:
    """Returns the variance and the mean. The mean keeps the reduced axes; the variance keeps them if `keepdim`."""
    op = low.op
    if not (low.fake(0).dtype.is_floating_point or low.fake(0).is_complex()):
        raise low.unsupported("integers")
    axes = axes_of(low, dim)
    center = reduce_mean(low, x, axes, keepdim=True)
    return _mean_square(low, op.Sub(x, center), axes, correction, keepdim), center


def _mean_square(
    low: Lowering, deviation: ir.Value, axes: list[int] | None, correction: float | None, keepdim: bool
) -> ir.Value:
    """Returns the sum of squared deviations, divided by their number minus the correction."""
    op = low.op
    correction = 1 if correction is None else correction
    if correction == 0:
        square = op.Mul(deviation, deviation)
        return reduce_mean(low, square, axes, keepdim)
    total = op.ReduceSumSquare(deviation, axes, keepdims=int(keepdim))
    sizes = low.fake(0).shape
    reduced = [sizes[axis] for axis in (range(len(sizes)) if axes is None else axes)]
    # PyTorch clamps the divisor to zero if the correction exceeds the number of elements.
    if all(isinstance(size, int) for size in reduced):
        divisor = low.tensor(float(max(math.prod(reduced) - correction, 0)), low.dtype)
    else:
        shape = op.Shape(deviation) if axes is None else op.Gather(op.Shape(deviation), axes)
        count = op.Cast(op.ReduceProd(shape, keepdims=0), to=low.dtype)
        divisor = op.Max(op.Sub(count, float(correction)), 0.0)
    return op.Div(total, divisor)


@lower("aten.var.correction")
def var(
    low: Lowering, x: ir.Value, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> ir.Value:
    return _variance(low, x, dim, correction, keepdim)[0]


@lower("aten.std.correction")
def std(
    low: Lowering, x: ir.Value, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> ir.Value:
    return _deviation(low, x, dim, correction, keepdim)[0]


def _deviation(
    low: Lowering, x: ir.Value, dim: Any, correction: float | None, keepdim: bool
) -> tuple[ir.Value, ir.Value]:
    """Returns the standard deviation, and the mean with the reduced axes kept."""
    op = low.op
    if low.dtype != ir.DataType.FLOAT or low.has_no_elements(0) or not low.fake(0).shape:
        variance, center = _variance(low, x, dim, correction, keepdim)
        return _root(low, variance, 0.5), center
    # PyTorch computes the variance in float64. In float32 the squares of deviations above 1e19 overflow, and those
    # below 1e-22 vanish: the deviations are divided by the largest one.
    axes = axes_of(low, dim)
    center = reduce_mean(low, x, axes, keepdim=True)
    distance = op.Sub(x, center)
    largest = op.ReduceMax(op.Abs(distance), axes, keepdims=1)
    scale = op.stop_gradient(op.Where(op.Equal(largest, 0.0), 1.0, largest))
    root = _root(low, _mean_square(low, op.Div(distance, scale), axes, correction, keepdim), 0.5)
    if not keepdim:
        scale = op.Squeeze(scale, list(range(len(low.fake(0).shape))) if axes is None else axes)
    return op.Mul(scale, root), center


def _root(low: Lowering, x: ir.Value, exponent: float) -> ir.Value:
    """Returns `x` raised to a power between 0 and 1, with a gradient of 0 at 0, as in PyTorch's std and norms."""
    op = low.op
    is_zero = op.Equal(x, 0.0)
    nonzero = op.Where(is_zero, 1.0, x)
    root = op.Sqrt(nonzero) if exponent == 0.5 else op.Pow(nonzero, float(exponent))
    return op.Where(is_zero, 0.0, root)


@lower("aten.var_mean.correction", "aten.std_mean.correction")
def var_mean(
    low: Lowering, x: ir.Value, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    spread_of = _deviation if "std_mean" in str(low.node.target) else _variance
    spread, center = spread_of(low, x, dim, correction, keepdim)
    if keepdim or not low.fake(0).shape:
        return spread, center
    axes = axes_of(low, dim)
    return spread, low.op.Squeeze(center, list(range(len(low.fake(0).shape))) if axes is None else axes)


@lower("aten.norm.Scalar", "aten.norm.ScalarOpt_dim")
def norm(low: Lowering, x: ir.Value, p: float | None = 2, dim: Any = None, keepdim: bool = False) -> ir.Value:
    return vector_norm(low, x, 2 if p is None else p, dim, keepdim)


@lower("aten.linalg_vector_norm.default")
def vector_norm(
    low: Lowering,
    x: ir.Value,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> ir.Value:
    op = low.op
    x = low.tensor(x, low.dtype)
    if ord in (1, 2):
        return _reduce(low, f"ReduceL{int(ord)}", x, dim, keepdim)
    if abs(ord) == math.inf:
        kind = "ReduceMax" if ord > 0 else "ReduceMin"
        # As in PyTorch, no element of a row with NaN gets a gradient.
        axes, is_nan = axes_of(low, dim), op.IsNaN(x)
        y = op.emit(kind, op.Abs(op.Where(is_nan, 0.0, x)), axes, keepdims=int(keepdim))
        count = op.ReduceSum(op.Cast(is_nan, to=ir.DataType.FLOAT), axes, keepdims=int(keepdim))
        return op.Where(op.Greater(count, 0.0), op.const(math.nan, like=x), y)
    if ord == 0:
        return _reduce(low, "ReduceSum", op.Cast(op.Not(op.Equal(x, 0.0)), to=low.dtype), dim, keepdim)
    # For p < 1, the derivative of |x|^p at 0 is infinite.
    if ord < 1:
        raise low.unsupported(f"a norm of order {ord}")
    total = _reduce(low, "ReduceSum", op.Pow(op.Abs(x), float(ord)), dim, keepdim)
    return _root(low, total, 1 / ord)


@lower("aten.logsumexp.default")
def logsumexp(low: Lowering, x: ir.Value, dim: Any, keepdim: bool = False) -> ir.Value:
    return _reduce(low, "ReduceLogSumExp", low.tensor(x, low.dtype), dim, keepdim)
