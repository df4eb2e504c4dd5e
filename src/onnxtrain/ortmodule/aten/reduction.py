"""Reductions, cumulative operations, and order."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from onnxtrain.ortmodule._lowering import Lowering, lower
from onnxtrain.ortmodule.aten.comparison import as_bool
from onnxtrain.ortmodule.aten.shape import axis_of

SMALL_INTEGERS = (ir.DataType.INT8, ir.DataType.INT16, ir.DataType.UINT8)


def _axes(low: Lowering, dim: Any) -> list[int] | None:
    """The axes to reduce, from PyTorch's argument; None for all, which an empty list means too."""
    if dim is None or (isinstance(dim, list | tuple) and not dim) or not low.fake(0).shape:
        return None
    return [axis_of(low, d) for d in (dim if isinstance(dim, list | tuple) else [dim])]


def _reduce(low: Lowering, op_type: str, x: ir.Value, dim: Any, keepdim: bool) -> ir.Value:
    axes = _axes(low, dim)
    return low.op.emit(op_type, x, axes, keepdims=int(keepdim))  # type: ignore[no-any-return]


@lower("aten.mean.dim", "aten.mean.default")
def mean(low: Lowering, x: ir.Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> ir.Value:
    return _reduce(low, "ReduceMean", low.tensor(x, low.dtype), dim, keepdim)


@lower("aten.sum.dim_IntList", "aten.sum.default")
def sum_(low: Lowering, x: ir.Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> ir.Value:
    return _reduce(low, "ReduceSum", low.tensor(x, low.dtype), dim, keepdim)


@lower("aten.prod.dim_int", "aten.prod.default")
def prod(low: Lowering, x: ir.Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> ir.Value:
    return _reduce(low, "ReduceProd", low.tensor(x, low.dtype), dim, keepdim)


@lower("aten.amax.default", "aten.amin.default", "aten.max.default", "aten.min.default")
def extremum(low: Lowering, x: ir.Value, dim: Any = None, keepdim: bool = False) -> ir.Value:
    """Elements that reach the extremum share the gradient evenly, as in PyTorch."""
    largest = str(low.node.target).split(".")[1].endswith("max")
    if low.dtype in SMALL_INTEGERS:
        x = low.tensor(x, ir.DataType.INT32)
    return _reduce(low, "ReduceMax" if largest else "ReduceMin", x, dim, keepdim)


@lower("aten.max.dim", "aten.min.dim")
def extremum_with_index(low: Lowering, x: ir.Value, dim: int, keepdim: bool = False) -> Any:
    """By TopK, which gives the gradient to the one element that was chosen, as PyTorch does."""
    op = low.op
    if not low.fake(0).shape:
        return op.Identity(x), op.const(0)
    if x.dtype == ir.DataType.BOOL:
        x = low.tensor(x, ir.DataType.INT32)
    axis = axis_of(low, dim)
    largest = int(str(low.node.target) == "aten.max.dim")
    values, indices = op.TopK(x, [1], axis=axis, largest=largest, _outputs=2)
    return (values, indices) if keepdim else (op.Squeeze(values, [axis]), op.Squeeze(indices, [axis]))


@lower("aten.argmax.default", "aten.argmin.default")
def arg_extremum(low: Lowering, x: ir.Value, dim: int | None = None, keepdim: bool = False) -> ir.Value:
    op = low.op
    if x.dtype in SMALL_INTEGERS:
        x = low.tensor(x, ir.DataType.INT32)
    op_type = "ArgMax" if "argmax" in str(low.node.target) else "ArgMin"
    rank = len(low.fake(0).shape)
    if dim is None or rank == 0:
        index = op.emit(op_type, op.Reshape(x, [-1]), axis=0, keepdims=0)
        return op.Reshape(index, [1] * rank) if keepdim and rank else index  # type: ignore[no-any-return]
    return op.emit(op_type, x, axis=axis_of(low, dim), keepdims=int(keepdim))  # type: ignore[no-any-return]


@lower("aten.any", "aten.all")
def any_or_all(low: Lowering, x: ir.Value, dim: Any = None, keepdim: bool = False) -> ir.Value:
    reduction = "ReduceMax" if str(low.node.target).startswith("aten.any") else "ReduceMin"
    return _reduce(low, reduction, as_bool(low, x), dim, keepdim)


def _variance(
    low: Lowering, x: ir.Value, dim: Any, correction: Any, keepdim: bool
) -> tuple[ir.Value, ir.Value]:
    """The variance, and the mean with the reduced axes kept."""
    op = low.op
    axes = _axes(low, dim)
    center = op.ReduceMean(x, axes, keepdims=1)
    deviation = op.Sub(x, center)
    correction = 1 if correction is None else correction
    if correction == 0:
        square = op.Mul(deviation, deviation)
        return op.ReduceMean(square, axes, keepdims=int(keepdim)), center
    total = op.ReduceSumSquare(deviation, axes, keepdims=int(keepdim))
    sizes = low.fake(0).shape
    reduced = [sizes[axis] for axis in (range(len(sizes)) if axes is None else axes)]
    if all(isinstance(size, int) for size in reduced):
        freedom = low.tensor(float(max(math.prod(reduced) - correction, 0)), low.dtype)
    else:
        shape = op.Shape(x) if axes is None else op.Gather(op.Shape(x), axes)
        count = op.Cast(op.ReduceProd(shape, keepdims=0), to=low.dtype)
        freedom = op.Max(op.Sub(count, float(correction)), 0.0)
    return op.Div(total, freedom), center


@lower("aten.var.correction")
def var(
    low: Lowering, x: ir.Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> ir.Value:
    return _variance(low, x, dim, correction, keepdim)[0]


@lower("aten.std.correction")
def std(
    low: Lowering, x: ir.Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> ir.Value:
    return _root(low, _variance(low, x, dim, correction, keepdim)[0], 0.5)


def _root(low: Lowering, x: ir.Value, exponent: float) -> ir.Value:
    """A power between 0 and 1, with the gradient 0 at 0, as PyTorch's std and norms have it."""
    op = low.op
    zero = op.Equal(x, 0.0)
    safe = op.Where(zero, 1.0, x)
    root = op.Sqrt(safe) if exponent == 0.5 else op.Pow(safe, float(exponent))
    return op.Where(zero, 0.0, root)  # type: ignore[no-any-return]


@lower("aten.var_mean.correction", "aten.std_mean.correction")
def var_mean(
    low: Lowering, x: ir.Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    spread, center = _variance(low, x, dim, correction, keepdim)
    if "std_mean" in str(low.node.target):
        spread = _root(low, spread, 0.5)
    if keepdim or not low.fake(0).shape:
        return spread, center
    axes = _axes(low, dim)
    return spread, low.op.Squeeze(center, list(range(len(low.fake(0).shape))) if axes is None else axes)


@lower("aten.norm.Scalar")
def norm(low: Lowering, x: ir.Value, p: Any = 2) -> ir.Value:
    return vector_norm(low, x, p)


@lower("aten.linalg_vector_norm.default")
def vector_norm(
    low: Lowering,
    x: ir.Value,
    ord: Any = 2,
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
        return _reduce(low, "ReduceMax" if ord > 0 else "ReduceMin", op.Abs(x), dim, keepdim)
    if ord == 0:
        return _reduce(low, "ReduceSum", op.Cast(op.Not(op.Equal(x, 0.0)), to=low.dtype), dim, keepdim)
    if ord < 1:
        raise low.unsupported(f"norm of order {ord}")
    total = _reduce(low, "ReduceSum", op.Pow(op.Abs(x), float(ord)), dim, keepdim)
    return _root(low, total, 1 / ord)


@lower("aten.logsumexp.default")
def logsumexp(low: Lowering, x: ir.Value, dim: Any, keepdim: bool = False) -> ir.Value:
    return _reduce(low, "ReduceLogSumExp", low.tensor(x, low.dtype), dim, keepdim)


@lower("aten.cumsum.default")
def cumsum(low: Lowering, x: ir.Value, dim: int, *, dtype: Any = None) -> ir.Value:
    x = low.tensor(x, low.dtype)
    return low.op.CumSum(x, low.op.const(axis_of(low, dim))) if low.fake(0).shape else x


@lower("aten.cumprod.default")
def cumprod(low: Lowering, x: ir.Value, dim: int, *, dtype: Any = None) -> ir.Value:
    """In log2(size) steps, each of which multiplies by what lies 1, 2, 4, ... places before (1 before the first).

    A symbolic size has no known number of steps: then every prefix is multiplied on its own.
    """
    op = low.op
    x = low.tensor(x, low.dtype)
    if not low.fake(0).shape:
        return x
    axis = axis_of(low, dim)
    size = low.fake(0).shape[axis]
    one = low.tensor(1, low.dtype)
    if not isinstance(size, int):
        places = op.Range(0, op.Squeeze(op.Shape(x, start=axis, end=axis + 1), [0]), 1)
        prefix = op.LessOrEqual(places, op.Unsqueeze(places, [1]))  # [end of the prefix, place]
        behind = len(low.fake(0).shape) - axis - 1
        prefix = op.Unsqueeze(prefix, [2 + i for i in range(behind)]) if behind else prefix
        rows = op.Where(prefix, op.Unsqueeze(x, [axis]), one)
        return op.ReduceProd(rows, [axis + 1], keepdims=0)  # type: ignore[no-any-return]
    shift = 1
    while shift < size:
        before = op.pad(x, [shift, -shift], [axis], len(low.fake(0).shape), one)
        x = op.Mul(x, before)
        shift *= 2
    return x


@lower("aten.topk.default")
def topk(
    low: Lowering,
    x: ir.Value,
    k: Any,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
) -> Any:
    if not low.fake(0).shape:
        return low.op.Identity(x), low.op.const(0)
    axis = axis_of(low, dim)
    return low.op.TopK(x, low.ints(k), axis=axis, largest=int(largest), sorted=int(sorted), _outputs=2)


@lower("aten.sort.default", "aten.sort.stable")
def sort(low: Lowering, x: ir.Value, *args: Any, stable: Any = None, **keywords: Any) -> Any:
    """By TopK of all elements, which keeps the order of equal ones."""
    return _sorted(low, x, *args, **keywords)


def _sorted(low: Lowering, x: ir.Value, dim: int = -1, descending: bool = False) -> Any:
    op = low.op
    if not low.fake(0).shape:
        return op.Identity(x), op.const(0)
    if x.dtype == ir.DataType.BOOL:
        x = low.tensor(x, ir.DataType.INT32)
    axis = axis_of(low, dim)
    return op.TopK(x, op.dim(x, axis), axis=axis, largest=int(descending), _outputs=2)
