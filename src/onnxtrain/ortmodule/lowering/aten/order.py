"""Lowers extrema and sorting.

As in PyTorch, NaN counts as greater than every number and hides every other element. The comparisons of ONNX Runtime's
kernels are all false for NaN, so that these leave it in or out by chance; each lowering finds NaN on its own.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from onnxtrain.ortmodule.lowering._table import Lowering, is_float, lower
from onnxtrain.ortmodule.lowering.aten.pointwise import select
from onnxtrain.ortmodule.lowering.aten.shape import axis_of

# ONNX Runtime has TopK, ArgMax, ReduceMax and ReduceMin for some of these only: they are computed in int32.
SMALL_INTEGERS = (ir.DataType.INT8, ir.DataType.INT16, ir.DataType.UINT8)


def axes_of(low: Lowering, dim: Any) -> list[int] | None:
    """Returns the axes to reduce from PyTorch's `dim`; None for all axes, which an empty list means too."""
    if dim is None or (isinstance(dim, list | tuple) and not dim) or not low.fake(0).shape:
        return None
    return [axis_of(low, d) for d in (dim if isinstance(dim, list | tuple) else [dim])]


def _nan_as_number(low: Lowering, x: ir.Value) -> ir.Value:
    """Returns 1 for NaN and 0 for other elements."""
    # float32, because ONNX Runtime reduces booleans more slowly.
    return low.op.Cast(low.op.IsNaN(x), to=ir.DataType.FLOAT)


def _unless_nan(
    low: Lowering, nans: ir.Value, axes: list[int] | None, keepdim: bool, y: ir.Value, nan: Any
) -> ir.Value:
    """Returns `y`, or `nan` wherever `nans` has a one along the axes."""
    op = low.op
    has_nan = op.Greater(op.ReduceSum(nans, axes, keepdims=int(keepdim)), 0.0)
    return op.Where(has_nan, nan, y)


def reduced_extremum(
    low: Lowering, op_type: str, x: ir.Value, axes: list[int] | None, keepdim: bool
) -> ir.Value:
    """Returns ReduceMax or ReduceMin, NaN where an element is NaN."""
    y = low.op.emit(op_type, x, axes, keepdims=int(keepdim))
    if not is_float(x):
        return y
    return _unless_nan(low, _nan_as_number(low, x), axes, keepdim, y, low.op.const(math.nan, like=x))


def with_nan(low: Lowering, y: ir.Value, x: ir.Value, axis: int) -> ir.Value:
    """Returns `y`, of the shape of `x`, with NaN in each row along the axis in which `x` has a NaN."""
    return _unless_nan(low, _nan_as_number(low, x), [axis], True, y, low.op.const(math.nan, like=x))


@lower("aten.amax.default", "aten.amin.default", "aten.max.default", "aten.min.default")
def extremum(low: Lowering, x: ir.Value, dim: Any = None, keepdim: bool = False) -> ir.Value:
    largest = str(low.node.target).split(".")[1].endswith("max")
    if low.dtype in SMALL_INTEGERS:
        x = low.tensor(x, ir.DataType.INT32)
    if dim is None or dim == []:
        x = _not_empty(low, x)
    # ReduceMax and ReduceMin share the gradient evenly among equal extrema, as PyTorch does.
    return reduced_extremum(low, "ReduceMax" if largest else "ReduceMin", x, axes_of(low, dim), keepdim)


def _not_empty(low: Lowering, x: ir.Value) -> ir.Value:
    """Returns a tensor, with a check at run time that it has an element where its size depends on the data.

    Eager PyTorch refuses the `max()` and `min()` of an empty tensor, and ONNX Runtime returns an infinity.
    """
    # Not asked if the number is known to be positive: PyTorch's own shape function of `amax` has noted that it is.
    if not free_unbacked_symbols(low.fake(0).numel()):
        return x
    op = low.op
    # Gather fails where there is no element 0; then PyTorch runs the graph and raises its own error.
    first = op.stop_gradient(op.Gather(op.Reshape(x, [-1]), 0, axis=0))
    return op.Where(op.Equal(first, first), x, x)


@lower("aten.maximum.default", "aten.minimum.default")
def larger_or_smaller(low: Lowering, a: ir.Value, b: ir.Value) -> ir.Value:
    largest = "maximum" in str(low.node.target)
    if low.dtype == ir.DataType.BOOL:
        # ONNX's Max and Min take numbers only.
        return low.op.Or(a, b) if largest else low.op.And(a, b)
    a, b = low.tensors(a, b)
    # ONNX Runtime has no Max and Min kernels for int16.
    if low.dtype == ir.DataType.INT16:
        first = low.op.Greater(a, b) if largest else low.op.Less(a, b)
        return select(low, first, a, b)
    return low.op.Max(a, b) if largest else low.op.Min(a, b)


@lower("aten.fmax.default", "aten.fmin.default", "prims.fmax.default", "prims.fmin.default")
def extremum_of_numbers(low: Lowering, a: ir.Value, b: ir.Value) -> ir.Value:
    """Returns the larger (smaller) one, or where one is NaN the other; of equal ones `a` gets the whole gradient."""
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
        # TopK needs an axis.
        return low.op.Identity(x), low.op.const(0)
    # By TopK, not ReduceMax and ArgMax: its gradient goes to the chosen element alone, as in PyTorch.
    largest = str(low.node.target) == "aten.max.dim"
    return _kth(low, x, axis_of(low, dim), 1, largest, keepdim)


@lower("aten.kthvalue.default")
def kth_value(low: Lowering, x: ir.Value, k: Any, dim: int = -1, keepdim: bool = False) -> Any:
    if not low.fake(0).shape:
        return low.op.Identity(x), low.op.const(0)
    return _kth(low, x, axis_of(low, dim), k, False, keepdim, nan_first=False)


@lower("aten.median.dim")
def median_over_axis(low: Lowering, x: ir.Value, dim: int, keepdim: bool = False) -> Any:
    if not low.fake(0).shape:
        return low.op.Identity(x), low.op.const(0)
    axis = axis_of(low, dim)
    # Of an even number of elements PyTorch takes the lower one of the two in the middle.
    return _kth(low, x, axis, _middle(low, low.fake(0).shape[axis], low.op.dim(x, axis)), False, keepdim)


@lower("aten.nanmedian.dim")
def nanmedian_over_axis(low: Lowering, x: ir.Value, dim: int, keepdim: bool = False) -> Any:
    if not low.fake(0).shape or not is_float(x):
        return median_over_axis(low, x, dim, keepdim)
    return _middle_number(low, x, axis_of(low, dim), keepdim)


def _middle_number(low: Lowering, x: ir.Value, axis: int, keepdim: bool) -> tuple[ir.Value, ir.Value]:
    """Returns the lower median of the elements that are not NaN, and its index; NaN if all are."""
    op = low.op
    _, order = _ordered(low, x, op.dim(x, axis), axis, False)
    # `order` has NaN among the infinities. TopK is stable: a second one moves NaN to the end.
    nans = op.GatherElements(_nan_as_number(low, x), order, axis=axis)
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
    if not low.fake(0).shape:
        return x
    if low.has_no_elements(0) and is_float(x):
        # The median of no elements is NaN.
        return op.Add(op.ReduceSum(x, keepdims=0), float("nan"))
    flat = op.Reshape(x, [-1])
    flat.shape = ir.Shape([n if isinstance(n := low.fake(0).numel(), int) else str(n)])
    if str(low.node.target) == "aten.nanmedian.default" and is_float(x):
        value, _ = _middle_number(low, flat, 0, False)
    else:
        value, _ = _kth(low, flat, 0, _middle(low, low.fake(0).numel(), op.Shape(flat)), False, False)
    if not is_float(x):
        return value
    # Unlike `median` over an axis, PyTorch's gradient of this one is shared by all elements equal to the median.
    value = low.op.stop_gradient(value)
    equal = op.Or(op.Equal(flat, value), op.And(op.IsNaN(value), op.IsNaN(flat)))
    total = op.ReduceSum(op.Where(equal, flat, 0.0), keepdims=0)
    share = op.Div(total, op.ReduceSum(op.Cast(equal, to=x.dtype), keepdims=0))
    # Adds a zero that has this gradient.
    return op.Add(value, op.Sub(share, low.op.stop_gradient(share)))


def _middle(low: Lowering, size: Any, length: ir.Value) -> Any:
    """Returns the place, counted from 1, of the lower middle element: an int, or an int64 [1] value."""
    return (size + 1) // 2 if isinstance(size, int) else low.op.Div(low.op.Add(length, [1]), [2])


def _kth(
    low: Lowering, x: ir.Value, axis: int, k: Any, largest: bool, keepdim: bool, nan_first: bool = True
) -> tuple[ir.Value, ir.Value]:
    """Returns the k-th largest or smallest element along an axis, and its index.

    With `nan_first`, both are those of the first NaN if there is one.
    """
    op = low.op
    if x.dtype == ir.DataType.BOOL or x.dtype in SMALL_INTEGERS:
        x = low.tensor(x, ir.DataType.INT32)
    if nan_first:
        values, indices = op.TopK(x, low.ints(k), axis=axis, largest=int(largest), _outputs=2)
    else:
        values, indices = _ordered(low, x, low.ints(k), axis, largest)
    if not (isinstance(k, int) and k == 1):
        values, indices = (op.Gather(v, [-1], axis=axis) for v in (values, indices))
    if not keepdim:
        values, indices = op.Squeeze(values, [axis]), op.Squeeze(indices, [axis])
    if not (nan_first and is_float(x)):
        return values, indices
    nans = _nan_as_number(low, x)
    first = op.ArgMax(nans, axis=axis, keepdims=int(keepdim))
    return (
        _unless_nan(low, nans, [axis], keepdim, values, op.const(math.nan, like=x)),
        _unless_nan(low, nans, [axis], keepdim, indices, first),
    )


@lower("aten.argmax.default", "aten.argmin.default")
def arg_extremum(low: Lowering, x: ir.Value, dim: int | None = None, keepdim: bool = False) -> ir.Value:
    op = low.op
    if x.dtype in SMALL_INTEGERS:
        x = low.tensor(x, ir.DataType.INT32)
    op_type = "ArgMax" if "argmax" in str(low.node.target) else "ArgMin"
    rank = len(low.fake(0).shape)
    if dim is None or rank == 0:
        # Without a dim PyTorch counts through the flattened tensor.
        index = _arg(low, op_type, op.Reshape(x, [-1]), 0, False)
        return op.Reshape(index, [1] * rank) if keepdim and rank else index
    return _arg(low, op_type, x, axis_of(low, dim), keepdim)


def _arg(low: Lowering, op_type: str, x: ir.Value, axis: int, keepdim: bool) -> ir.Value:
    """Returns ArgMax or ArgMin along an axis: the index of the first NaN if there is one."""
    index = low.op.emit(op_type, x, axis=axis, keepdims=int(keepdim))
    if not is_float(x):
        return index
    nans = _nan_as_number(low, x)
    first = low.op.ArgMax(nans, axis=axis, keepdims=int(keepdim))
    return _unless_nan(low, nans, [axis], keepdim, index, first)


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
    return _ordered(low, x, low.ints(k), axis_of(low, dim), largest, sorted)


@lower("aten.sort.default", "aten.sort.stable")
def sort(low: Lowering, x: ir.Value, *args: Any, stable: Any = None, **keywords: Any) -> Any:
    # `stable` is not read: TopK keeps the order of equal elements.
    return _sorted(low, x, *args, **keywords)


def _sorted(low: Lowering, x: ir.Value, dim: int = -1, descending: bool = False) -> Any:
    op = low.op
    if not low.fake(0).shape:
        return op.Identity(x), op.const(0)
    if x.dtype == ir.DataType.BOOL:
        # ONNX's TopK takes numbers only.
        x = low.tensor(x, ir.DataType.INT32)
    axis = axis_of(low, dim)
    return _ordered(low, x, op.dim(x, axis), axis, descending)


def _ordered(
    low: Lowering, x: ir.Value, k: Any, axis: int, largest: bool, sorted: bool = True
) -> tuple[ir.Value, ir.Value]:
    """Returns TopK, with NaN in the place of infinity."""
    op, attributes = low.op, {"axis": axis, "largest": int(largest), "sorted": int(sorted)}
    if not is_float(x):
        values, indices = op.TopK(x, k, **attributes, _outputs=2)
        return values, indices
    # TopK only finds the order; the elements, and their gradients, come by GatherElements.
    key = low.op.stop_gradient(op.Where(op.IsNaN(x), op.const(math.inf, like=x), x))
    _, indices = op.TopK(key, k, **attributes, _outputs=2)
    return op.GatherElements(x, indices, axis=axis), indices


@lower("aten._unique2.default")
def unique(
    low: Lowering, x: ir.Value, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[ir.Value, ...]:
    op = low.op
    # ONNX Runtime's Unique takes float32, float64, int64 and int8.
    if x.dtype == ir.DataType.BOOL or x.dtype in SMALL_INTEGERS or x.dtype == ir.DataType.INT32:
        x = low.tensor(x, ir.DataType.INT64)
    # PyTorch sorts the result too, even with sorted=False.
    values, _, inverse, counts = op.Unique(op.Reshape(x, [-1]), sorted=1, _outputs=4)
    if low.fake(0).dim() != 1:
        inverse = op.reshape_like(inverse, x)
    return values, inverse, counts


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
    """Lowers to the number of elements of `ordered`, along its last axis, that are less (with `right`: or equal)."""
    op = low.op
    if sorter is not None:
        ordered = op.GatherElements(ordered, sorter, axis=-1)
    values = low.tensor(values, ordered.dtype or low.dtype)
    values = op.Unsqueeze(values, [-1])
    if len(low.fake(0).shape) > 1:
        ordered = op.Unsqueeze(ordered, [-2])
    # Compares each value with all elements: ONNX has no binary search.
    before = op.LessOrEqual(ordered, values) if right or side == "right" else op.Less(ordered, values)
    counted = op.Cast(before, to=ir.DataType.INT64)
    return op.ReduceSum(counted, [low.result.dim()], keepdims=0)


@lower("aten.histc.default")
def histc(low: Lowering, x: ir.Value, bins: int = 100, min: Any = 0, max: Any = 0) -> ir.Value:
    """Lowers to the number of elements in each bin of equal width; the last bin includes the upper bound."""
    op = low.op
    if min == max:
        raise low.unsupported("a range that depends on the data")
    flat = op.Reshape(x, [-1])
    place = op.Floor(op.Div(op.Mul(op.Sub(flat, float(min)), float(bins)), float(max) - float(min)))
    place = op.Where(op.Equal(flat, float(max)), float(bins - 1), place)
    # Compares the number of each bin, as a column, with that of all elements. Elements out of range equal none.
    numbers = low.op.const([[float(i)] for i in range(bins)], low.dtype)
    return op.ReduceSum(op.Cast(op.Equal(numbers, place), to=low.dtype), [1], keepdims=0)
