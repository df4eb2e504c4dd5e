"""Lowers max, min, argmax, median, sort and topk.

PyTorch orders NaN above all numbers, and max and min propagate it. ONNX Runtime's kernels handle NaN inconsistently,
because all comparisons with it are false. So the lowerings here handle NaN with separate ops.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from onnxtrain import functions
from onnxtrain.ortmodule.lowering._table import Lowering, is_float, lower
from onnxtrain.ortmodule.lowering.aten.pointwise import select
from onnxtrain.ortmodule.lowering.aten.shape import axis_of

# Computed in int32: for some of these, ONNX Runtime has no kernels of TopK, ArgMax, ReduceMax or ReduceMin.
SMALL_INTEGERS = (ir.DataType.INT8, ir.DataType.INT16, ir.DataType.UINT8)


def axes_of(low: Lowering, dim: Any) -> list[int] | None:
    """Converts PyTorch's `dim` to a list of non-negative axes. Returns None if it means all axes."""
    if dim is None or (isinstance(dim, list | tuple) and not dim) or not low.fake(0).shape:
        return None
    return [axis_of(low, d) for d in (dim if isinstance(dim, list | tuple) else [dim])]


def _nan_mask(low: Lowering, x: ir.Value) -> ir.Value:
    """Returns 1 where `x` is NaN, and 0 elsewhere."""
    # float32, because ONNX Runtime reduces booleans slowly.
    return low.op.Cast(low.op.IsNaN(x), to=ir.DataType.FLOAT)


def _unless_nan(
    low: Lowering, nans: ir.Value, axes: list[int] | None, keepdim: bool, y: ir.Value, nan: Any
) -> ir.Value:
    """Replaces the elements of `y`, a reduction, with `nan` where the reduced elements include a NaN.

    Args:
        low: the lowering.
        nans: `_nan_mask` of the reduced tensor.
        axes: the reduced axes, None for all.
        keepdim: True if `y` keeps the reduced axes.
        y: the reduction.
        nan: the replacement, e.g. NaN, or the index of the first NaN.
    """
    op = low.op
    has_nan = op.Greater(op.ReduceSum(nans, axes, keepdims=int(keepdim)), 0.0)
    return op.Where(has_nan, nan, y)


def with_nan(low: Lowering, y: ir.Value, x: ir.Value, axis: int) -> ir.Value:
    """Returns `y` with each row along `axis` filled with NaN if the corresponding row of `x` contains a NaN."""
    return _unless_nan(low, _nan_mask(low, x), [axis], True, y, low.op.const(math.nan, like=x))


@lower("aten.amax.default", "aten.amin.default", "aten.max.default", "aten.min.default")
def extremum(low: Lowering, x: ir.Value, dim: Any = None, keepdim: bool = False) -> ir.Value:
    largest = str(low.node.target).split(".")[1].endswith("max")
    if low.dtype in SMALL_INTEGERS:
        x = low.tensor(x, ir.DataType.INT32)
    if dim is None or dim == []:
        x = _check_not_empty(low, x)
    op_type, axes = "ReduceMax" if largest else "ReduceMin", axes_of(low, dim)
    # Like PyTorch, our gradient rules of ReduceMax and ReduceMin distribute the gradient evenly among ties.
    if not is_float(x):
        return low.op.emit(op_type, x, axes, keepdims=int(keepdim))
    if str(low.node.target) in ("aten.max.default", "aten.min.default"):
        return _extremum_of_all(low, op_type, x)
    op, nans = low.op, _nan_mask(low, x)
    y = op.emit(op_type, x, axes, keepdims=int(keepdim))
    # A factor of NaN, so that all elements of a row with NaN get a gradient of NaN, as in PyTorch.
    return op.Mul(y, _unless_nan(low, nans, axes, keepdim, op.const(1.0, like=x), op.const(math.nan, like=x)))


def _extremum_of_all(low: Lowering, op_type: str, x: ir.Value) -> ir.Value:
    """Reduces all elements with ReduceMax or ReduceMin. If there are NaNs, they share the gradient, as in PyTorch."""
    op, is_nan = low.op, low.op.IsNaN(x)
    y = op.emit(op_type, op.Where(is_nan, -math.inf if op_type == "ReduceMax" else math.inf, x), keepdims=0)
    count = op.ReduceSum(op.Cast(is_nan, to=ir.DataType.FLOAT), keepdims=0)
    mean = op.Div(
        op.ReduceSum(op.Where(is_nan, x, 0.0), keepdims=0), low.tensor(op.Max(count, 1.0), low.dtype)
    )
    return op.Where(op.Greater(count, 0.0), mean, y)


def _check_not_empty(low: Lowering, x: ir.Value) -> ir.Value:
    """Returns `x`. If its size depends on the data, adds a check that fails at run time if `x` has no elements.

    Eager PyTorch raises an error for `max()` and `min()` of an empty tensor; ONNX Runtime would return infinity.
    """
    # `statically_known_true(numel > 0)` would be useless here: tracing `amax` has already assumed it.
    if not free_unbacked_symbols(low.fake(0).numel()):
        return x
    op = low.op
    # Gather fails if there is no element 0. PyTorch then runs the graph, and raises its own error.
    first = op.stop_gradient(op.Gather(op.Reshape(x, [-1]), 0, axis=0))
    return op.Where(op.Equal(first, first), x, x)


@lower("aten.maximum.default", "aten.minimum.default")
def maximum_or_minimum(low: Lowering, a: ir.Value, b: ir.Value) -> ir.Value:
    largest = "maximum" in str(low.node.target)
    if low.dtype == ir.DataType.BOOL:
        # ONNX's Max and Min do not support bool.
        return low.op.Or(a, b) if largest else low.op.And(a, b)
    a, b = low.tensors(a, b)
    # ONNX Runtime has no Max and Min kernels for int16.
    if low.dtype == ir.DataType.INT16:
        first = low.op.Greater(a, b) if largest else low.op.Less(a, b)
        return select(low, first, a, b)
    return low.op.Max(a, b) if largest else low.op.Min(a, b)


@lower("aten.fmax.default", "aten.fmin.default", "prims.fmax.default", "prims.fmin.default")
def fmax_or_fmin(low: Lowering, a: ir.Value, b: ir.Value) -> ir.Value:
    """Lowers fmax and fmin, which ignore NaN if the other operand is a number.

    If the operands are equal, `a` gets the gradient.
    """
    op = low.op
    a, b = low.tensors(a, b)
    largest = "fmax" in str(low.node.target)
    if not is_float(a):
        return op.Max(a, b) if largest else op.Min(a, b)
    first = op.GreaterOrEqual(a, b) if largest else op.LessOrEqual(a, b)
    return op.Where(op.Or(first, op.IsNaN(b)), a, b)


@lower("aten.max.dim", "aten.min.dim")
def extremum_with_index(low: Lowering, x: ir.Value, dim: int, keepdim: bool = False) -> Any:
    if not low.fake(0).shape:
        # TopK does not support scalars.
        return low.op.Identity(x), low.op.const(0)
    # The gradient goes to the selected element only, as in PyTorch. ReduceMax would distribute it among ties.
    largest, axis = str(low.node.target) == "aten.max.dim", axis_of(low, dim)
    if not is_float(x):
        return _kth(low, x, axis, 1, largest, keepdim)
    value, index = low.op.call(functions.extremum, x, axis=axis, largest=int(largest), _outputs=2)
    return (value, index) if keepdim else (low.op.Squeeze(value, [axis]), low.op.Squeeze(index, [axis]))


@lower("aten.kthvalue.default")
def kth_value(low: Lowering, x: ir.Value, k: Any, dim: int = -1, keepdim: bool = False) -> Any:
    if x.dtype == ir.DataType.BOOL:
        raise low.unsupported("booleans")
    if not low.fake(0).shape:
        return low.op.Identity(x), low.op.const(0)
    return _kth(low, x, axis_of(low, dim), k, False, keepdim, nan_first=False)


@lower("aten.median.dim")
def median_over_axis(low: Lowering, x: ir.Value, dim: int, keepdim: bool = False) -> Any:
    if not low.fake(0).shape:
        return low.op.Identity(x), low.op.const(0)
    axis = axis_of(low, dim)
    # For an even number of elements, PyTorch returns the lower of the two middle ones.
    return _kth(low, x, axis, _middle(low, low.fake(0).shape[axis], low.op.dim(x, axis)), False, keepdim)


@lower("aten.nanmedian.dim")
def nanmedian_over_axis(low: Lowering, x: ir.Value, dim: int, keepdim: bool = False) -> Any:
    if not low.fake(0).shape or not is_float(x):
        return median_over_axis(low, x, dim, keepdim)
    return _middle_number(low, x, axis_of(low, dim), keepdim)


def _middle_number(low: Lowering, x: ir.Value, axis: int, keepdim: bool) -> tuple[ir.Value, ir.Value]:
    """Returns the lower median of the elements that are not NaN, along an axis, and its index.

    The median is NaN if all elements are NaN.
    """
    op = low.op
    _, order = ordered_topk(low, x, op.dim(x, axis), axis, False)
    # `order` has NaN among the infinities. TopK is stable: a second one moves NaN to the end.
    nans = op.GatherElements(_nan_mask(low, x), order, axis=axis)
    _, last = op.TopK(nans, op.dim(x, axis), axis=axis, largest=0, _outputs=2)
    order = op.GatherElements(order, last, axis=axis)
    numbers = op.Sub(op.dim(x, axis), op.Cast(op.ReduceSum(nans, [axis], keepdims=1), to=ir.DataType.INT64))
    middle = op.Div(op.Max(op.Sub(numbers, 1), op.const(0)), 2)
    index = op.GatherElements(order, middle, axis=axis)
    value = op.GatherElements(x, index, axis=axis)
    return (value, index) if keepdim else (op.Squeeze(value, [axis]), op.Squeeze(index, [axis]))


@lower("aten.median.default", "aten.nanmedian.default")
def median(low: Lowering, x: ir.Value) -> ir.Value:
    op = low.op
    if x.dtype == ir.DataType.BOOL:
        raise low.unsupported("booleans")
    if not low.fake(0).shape:
        return x
    if low.has_no_elements(0) and is_float(x):
        return op.Add(op.ReduceSum(x, keepdims=0), float("nan"))
    flat = op.Reshape(x, [-1])
    flat.shape = ir.Shape([n if isinstance(n := low.fake(0).numel(), int) else str(n)])
    if str(low.node.target) == "aten.nanmedian.default" and is_float(x):
        value, _ = _middle_number(low, flat, 0, False)
    else:
        value, _ = _kth(low, flat, 0, _middle(low, low.fake(0).numel(), op.Shape(flat)), False, False)
    if not is_float(x):
        return value
    # PyTorch distributes the gradient among all elements equal to the median, unlike for `median` along an axis.
    value = low.op.stop_gradient(value)
    equal = op.Or(op.Equal(flat, value), op.And(op.IsNaN(value), op.IsNaN(flat)))
    total = op.ReduceSum(op.Where(equal, flat, 0.0), keepdims=0)
    mean = op.Div(total, op.ReduceSum(op.Cast(equal, to=x.dtype), keepdims=0))
    # The difference is zero, and has this gradient.
    return op.Add(value, op.Sub(mean, low.op.stop_gradient(mean)))


def _middle(low: Lowering, size: Any, length: ir.Value) -> Any:
    """Returns the 1-based rank of the lower median among the elements of an axis.

    Args:
        low: the lowering.
        size: size of the axis, possibly symbolic.
        length: the same size as an ONNX value, int64 [1].

    Returns:
        An int, or an int64 [1] value if `size` is symbolic.
    """
    return (size + 1) // 2 if isinstance(size, int) else low.op.Div(low.op.Add(length, [1]), [2])


def _kth(
    low: Lowering, x: ir.Value, axis: int, k: Any, largest: bool, keepdim: bool, nan_first: bool = True
) -> tuple[ir.Value, ir.Value]:
    """Returns the k-th largest or smallest element along an axis, and its index.

    With `nan_first`, the result is the first NaN of a row that contains NaN. Without it, NaN counts as larger than all
    numbers.
    """
    op = low.op
    if x.dtype == ir.DataType.BOOL or x.dtype in SMALL_INTEGERS:
        x = low.tensor(x, ir.DataType.INT32)
    if nan_first:
        values, indices = op.TopK(x, low.ints(k), axis=axis, largest=int(largest), _outputs=2)
    else:
        values, indices = ordered_topk(low, x, low.ints(k), axis, largest)
    if not (isinstance(k, int) and k == 1):
        values, indices = (op.Gather(v, [-1], axis=axis) for v in (values, indices))
    if nan_first and is_float(x):
        nans = _nan_mask(low, x)
        indices = _unless_nan(low, nans, [axis], True, indices, op.ArgMax(nans, axis=axis, keepdims=1))
        # The chosen element gets the gradient, also if it is NaN.
        values = op.GatherElements(x, indices, axis=axis)
    return (values, indices) if keepdim else (op.Squeeze(values, [axis]), op.Squeeze(indices, [axis]))


@lower("aten.argmax.default", "aten.argmin.default")
def arg_extremum(low: Lowering, x: ir.Value, dim: int | None = None, keepdim: bool = False) -> ir.Value:
    op = low.op
    if x.dtype in SMALL_INTEGERS:
        x = low.tensor(x, ir.DataType.INT32)
    op_type = "ArgMax" if "argmax" in str(low.node.target) else "ArgMin"
    rank = len(low.fake(0).shape)
    if dim is None or rank == 0:
        index = _arg_extremum(low, op_type, op.Reshape(x, [-1]), 0, False)
        return op.Reshape(index, [1] * rank) if keepdim and rank else index
    return _arg_extremum(low, op_type, x, axis_of(low, dim), keepdim)


def _arg_extremum(low: Lowering, op_type: str, x: ir.Value, axis: int, keepdim: bool) -> ir.Value:
    """Returns ArgMax or ArgMin along an axis, or the index of the first NaN if there is one."""
    if not is_float(x):
        return low.op.emit(op_type, x, axis=axis, keepdims=int(keepdim))
    composite = functions.argmax if op_type == "ArgMax" else functions.argmin
    index = low.op.call(composite, x, axis=axis)
    return index if keepdim else low.op.Squeeze(index, [axis])


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
    return ordered_topk(low, x, low.ints(k), axis_of(low, dim), largest, sorted)


@lower("aten.sort.default", "aten.sort.stable")
def sort(low: Lowering, x: ir.Value, *args: Any, stable: Any = None, **keywords: Any) -> Any:
    # Ignores `stable`, because TopK is stable.
    return _sorted(low, x, *args, **keywords)


def _sorted(low: Lowering, x: ir.Value, dim: int = -1, descending: bool = False) -> Any:
    """Returns the sorted elements along an axis, and their indices."""
    op = low.op
    if not low.fake(0).shape:
        return op.Identity(x), op.const(0)
    if x.dtype == ir.DataType.BOOL:
        # ONNX's TopK does not support bool.
        x = low.tensor(x, ir.DataType.INT32)
    axis = axis_of(low, dim)
    return ordered_topk(low, x, op.dim(x, axis), axis, descending)


def ordered_topk(
    low: Lowering, x: ir.Value, k: Any, axis: int, largest: bool, sorted: bool = True
) -> tuple[ir.Value, ir.Value]:
    """Returns the values and the indices of the `k` largest or smallest elements along an axis.

    NaN counts as larger than all numbers. The elements are in order, the largest or smallest first, if `sorted`.
    """
    op, attributes = low.op, {"axis": axis, "largest": int(largest), "sorted": int(sorted)}
    if not is_float(x):
        values, indices = op.TopK(x, k, **attributes, _outputs=2)
        return values, indices
    # TopK only finds the order; GatherElements returns the elements, and passes on their gradients. In the sorting key,
    # NaN is replaced with infinity, and infinity with the largest finite number.
    largest_finite = op.const(torch.finfo(low.fake(0).dtype).max, like=x)
    finite = op.Where(op.IsInf(x, detect_negative=0), largest_finite, x)
    key = low.op.stop_gradient(op.Where(op.IsNaN(x), op.const(math.inf, like=x), finite))
    _, indices = op.TopK(key, k, **attributes, _outputs=2)
    return op.GatherElements(x, indices, axis=axis), indices
