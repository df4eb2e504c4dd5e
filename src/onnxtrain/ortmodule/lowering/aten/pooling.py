"""Lowers pooling. Inputs are `[batch, channels, *spatial]` or `[channels, *spatial]`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.ortmodule.lowering._table import Lowering, lower, per_axis
from onnxtrain.ortmodule.lowering.aten.indexing import checked_indices


@lower("aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default")
def max_pool(
    low: Lowering,
    x: ir.Value,
    kernel: list[int],
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[ir.Value, ir.Value | None]:
    """Lowers to MaxPool. The second result, the index of each maximum in its plane, is None if nothing reads it."""
    rank = len(kernel)
    attributes = _windows(rank, kernel, stride, padding, ceil_mode)
    attributes["dilations"] = per_axis(dilation, rank)
    if not low.uses_result(1):
        return _batched(low, x, rank, lambda x: low.op.MaxPool(x, **attributes)), None
    if len(low.fake(0).shape) != rank + 2:
        raise low.unsupported("indices of an input without a batch axis")
    y, indices = low.op.MaxPool(x, **attributes, _outputs=2)
    # PyTorch's indices are relative to each plane, ONNX's to the whole tensor.
    plane = low.op.ReduceProd(low.op.Shape(x, start=2), keepdims=0)
    return y, low.op.Mod(indices, plane)


@lower("aten.avg_pool1d.default", "aten.avg_pool2d.default", "aten.avg_pool3d.default")
def avg_pool(
    low: Lowering,
    x: ir.Value,
    kernel: list[int],
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> ir.Value:
    rank = len(kernel)
    kernel, stride = _limited_windows(low, kernel, stride, padding, ceil_mode)
    attributes = _windows(rank, kernel, stride, padding, ceil_mode)
    if divisor_override is not None and ceil_mode:
        _pad_to_last_window(low, attributes)
    # With divisor_override, PyTorch divides the sum over the window, including padding. The sum is the average times
    # the size of the window.
    attributes["count_include_pad"] = int(count_include_pad or divisor_override is not None)
    y = _batched(low, x, rank, lambda x: low.op.AveragePool(x, **attributes))
    if divisor_override is None:
        return y
    return low.op.Mul(y, math.prod(kernel) / divisor_override)


@lower("aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default")
def adaptive_avg_pool(low: Lowering, x: ir.Value, sizes_out: list[Any]) -> ir.Value:
    """Lowers to ReduceMean for output sizes of 1, to AveragePool for equal windows, or else to one pooling per axis."""
    rank = len(sizes_out)
    if all(isinstance(n, int) and n == 1 for n in sizes_out):
        return low.op.ReduceMean(x, list(range(-rank, 0)), keepdims=1)
    sizes_in = list(low.fake(0).shape[-rank:])
    is_static = all(isinstance(n, int) for n in (*sizes_in, *sizes_out))
    if is_static and all(n % size_out == 0 for n, size_out in zip(sizes_in, sizes_out, strict=True)):
        kernel = [n // size_out for n, size_out in zip(sizes_in, sizes_out, strict=True)]
        return _batched(low, x, rank, lambda x: low.op.AveragePool(x, kernel_shape=kernel, strides=kernel))
    shape = low.op.shape_of(x)
    # Averages one axis at a time, because windows are products of intervals.
    for axis, size_out in zip(range(-rank, 0), sizes_out, strict=True):
        x = _average_axis(low, x, axis, sizes_in[axis], size_out, shape)
    return x


def _average_axis(
    low: Lowering, x: ir.Value, axis: int, size_in: Any, size_out: Any, input_shape: ir.Value
) -> ir.Value:
    """Applies adaptive average pooling along one axis.

    Args:
        low: the lowering.
        x: the input, already pooled along the spatial axes before `axis`.
        axis: the axis to pool, counted from the end, e.g. -2.
        size_in: size of the axis, e.g. 7.
        size_out: its size after pooling, e.g. 3.
        input_shape: the shape of the input before any pooling, int64 [rank].
    """
    op, before = low.op, list(x.shape or ())
    is_static = isinstance(size_in, int) and isinstance(size_out, int)
    if not is_static or size_in * size_out > _LARGEST_MATRIX:
        return _averaged_windows(low, x, axis, size_in, size_out)
    matrix = op.const(_averaging_matrix(size_in, size_out), low.dtype)
    after = [*before[:axis], *low.shape(low.result)[axis : axis + 1 or None], *before[axis:][1:]]
    if axis == -1:
        y = op.MatMul(x, op.Transpose(matrix, perm=[1, 0]))
    elif axis == -2:
        y = op.MatMul(matrix, x)
    else:
        rows = op.Reshape(x, op.Concat(op.Shape(x, end=len(before) + axis + 1), [-1], axis=0))
        later_sizes = op.Slice(input_shape, [axis + 1], [np.iinfo(np.int64).max], [0])
        pooled = op.MatMul(matrix, rows)
        y = op.Reshape(pooled, op.Concat(op.Shape(pooled, end=-1), later_sizes, axis=0))
    y.shape = ir.Shape(after)
    return y


@lower("aten.adaptive_max_pool2d.default", "aten.adaptive_max_pool3d.default")
def adaptive_max_pool(low: Lowering, x: ir.Value, sizes_out: list[int]) -> tuple[ir.Value, ir.Value | None]:
    """Lowers to a Gather, which repeats elements so that windows are disjoint and equally long, and a MaxPool."""
    rank = len(sizes_out)
    if all(n == 1 for n in sizes_out) and not low.uses_result(1):
        return _batched(low, x, rank, lambda x: low.op.GlobalMaxPool(x)), None
    op, sizes_in = low.op, [low.specialized(n) for n in low.fake(0).shape[-rank:]]
    windows = [_equal_windows(n, size_out) for n, size_out in zip(sizes_in, sizes_out, strict=True)]
    kernel = [window.shape[1] for window in windows]
    shape = list(x.shape or ())
    for axis, (n, window) in enumerate(zip(sizes_in, windows, strict=True)):
        if window.size != n:
            x = op.Gather(x, window.ravel(), axis=len(shape) - rank + axis)
            shape[axis - rank] = window.size
            x.shape = ir.Shape(shape)
    attributes = {"kernel_shape": kernel, "strides": kernel}
    if not low.uses_result(1):
        return _batched(low, x, rank, lambda x: op.MaxPool(x, **attributes)), None
    if len(shape) != rank + 2:
        raise low.unsupported("indices of an input without a batch axis")
    y, indices = op.MaxPool(x, **attributes, _outputs=2)
    # ONNX's indices are relative to the whole tensor after the Gather, PyTorch's to each plane before it.
    plane = np.arange(math.prod(sizes_in)).reshape(sizes_in)
    for axis, window in enumerate(windows):
        plane = np.take(plane, window.ravel(), axis)
    return y, op.Gather(op.const(plane.ravel()), op.Mod(indices, plane.size))


def _window_bounds(size_in: int, size_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the start and end positions of adaptive pooling's windows, [size_out] each."""
    numbers = np.arange(size_out)
    return numbers * size_in // size_out, -(-(numbers + 1) * size_in // size_out)


def _equal_windows(size_in: int, size_out: int) -> np.ndarray:
    """Returns the input positions in each window of adaptive pooling, [size_out, length of the longest window].

    Shorter windows repeat their last position.
    """
    starts, ends = _window_bounds(size_in, size_out)
    steps = np.arange((ends - starts).max())
    places: np.ndarray = np.minimum(starts[:, None] + steps, ends[:, None] - 1)
    return places


@lower("aten.max_unpool2d.default", "aten.max_unpool3d.default")
def max_unpool(
    low: Lowering, x: ir.Value, indices: ir.Value, size: list[Any], *windows: list[int]
) -> ir.Value:
    """Lowers to a ScatterElements into zeros. For duplicate indices, any one value may be kept, as in PyTorch."""
    op, leading = low.op, len(low.fake(0).shape) - len(size)
    sizes = low.ints(size)
    leading_sizes = op.Shape(x, end=leading)
    rows = op.Concat(leading_sizes, op.ReduceProd(op.Shape(x, start=leading), keepdims=1), axis=0)
    planes = op.Expand(
        op.const(0.0, low.dtype), op.Concat(leading_sizes, op.ReduceProd(sizes, keepdims=1), axis=0)
    )
    positions = op.Reshape(checked_indices(low, 1, indices), rows)
    written = op.ScatterElements(planes, positions, op.Reshape(x, rows), axis=leading)
    return op.Reshape(written, op.Concat(leading_sizes, sizes, axis=0))


def _windows(rank: int, kernel: list[int], stride: Any, padding: Any, ceil_mode: bool) -> dict[str, Any]:
    """Returns the attributes of an ONNX pooling op, except for `dilations`."""
    kernel = per_axis(kernel, rank)
    pads = per_axis(padding, rank)
    return {
        "kernel_shape": kernel,
        "strides": per_axis(stride, rank) if stride else kernel,
        "pads": [*pads, *pads],
        "ceil_mode": int(ceil_mode),
    }


_LARGEST_MATRIX = 1 << 14
"""Maximum number of elements of a matrix that averages one axis."""

_MAX_UNLIMITED_KERNEL = 32
"""Kernels up to this size are not limited in ceil mode."""


def _limited_windows(
    low: Lowering, kernel: list[int], stride: Any, padding: Any, ceil_mode: bool
) -> tuple[list[int], list[int]]:
    """Returns the kernel size and the strides of a pooling op, after reducing oversized kernels in ceil mode.

    In ceil mode, PyTorch accepts kernels larger than the padded input, e.g. 768 for a sequence of 16. Computing the
    gradient with such a kernel could take gigabytes of memory. Along each axis where the kernel is larger, the kernel
    and the stride become the size of the padded input. The sizes of the input are specialized, unless the kernel has at
    most `_MAX_UNLIMITED_KERNEL` elements along each axis and so needs no limit.
    """
    rank = len(kernel)
    strides = per_axis(stride, rank) if stride else list(kernel)
    if not ceil_mode or max(kernel) <= _MAX_UNLIMITED_KERNEL:
        return kernel, strides
    sizes_in = [low.specialized(n) for n in low.fake(0).shape[-rank:]]
    padded_sizes = [n + 2 * pad for n, pad in zip(sizes_in, per_axis(padding, rank), strict=True)]
    strides = [step if k <= r else r for k, step, r in zip(kernel, strides, padded_sizes, strict=True)]
    return [min(k, r) for k, r in zip(kernel, padded_sizes, strict=True)], strides


def _pad_to_last_window(low: Lowering, attributes: dict[str, Any]) -> None:
    """Replaces ceil mode in AveragePool's attributes, in place, with padding up to the end of the last window.

    With `count_include_pad`, AveragePool counts explicit padding, but not the part of a window that ceil mode adds. All
    windows are then divided by the kernel's number of elements. The sizes of the input are specialized.
    """
    rank = len(attributes["kernel_shape"])
    sizes = zip(low.fake(0).shape[-rank:], low.result.shape[-rank:], strict=True)
    for axis, (size_in, size_out) in enumerate(sizes):
        last = (low.specialized(size_out) - 1) * attributes["strides"][axis] + attributes["kernel_shape"][
            axis
        ]
        attributes["pads"][rank + axis] = max(0, last - low.specialized(size_in) - attributes["pads"][axis])
    attributes["ceil_mode"] = 0


def _batched(low: Lowering, x: ir.Value, rank: int, pool: Callable[[ir.Value], ir.Value]) -> ir.Value:
    """Applies `pool`, which requires a batch axis, to an input with or without one."""
    if len(low.fake(0).shape) == rank + 2:
        return pool(x)
    batch = low.op.Unsqueeze(x, [0])
    batch.shape = ir.Shape([1, *(x.shape or ())])
    y = pool(batch)
    fake = low.result[0] if isinstance(low.result, tuple) else low.result
    y.shape = ir.Shape([1, *low.shape(fake)])
    return low.op.Squeeze(y, [0])


def _averaging_matrix(size_in: int, size_out: int) -> np.ndarray:
    """Returns the matrix of adaptive average pooling, [size_out, size_in]: row i averages the i-th window."""
    matrix = np.zeros((size_out, size_in))
    for i, (start, end) in enumerate(zip(*_window_bounds(size_in, size_out), strict=True)):
        matrix[i, start:end] = 1 / (end - start)
    return matrix


def _averaged_windows(low: Lowering, x: ir.Value, axis: int, size_in: Any, size_out: Any) -> ir.Value:
    """Applies adaptive average pooling along one axis: gathers the elements of all windows, and averages each window.

    The lengths of the windows differ by at most one, so gathering windows of equal length copies few additional
    elements.

    Args:
        low: the lowering.
        x: the input.
        axis: the axis to pool, counted from the end, e.g. -2.
        size_in: size of the axis, e.g. 7.
        size_out: its size after pooling, e.g. 3.
    """
    op, before = low.op, list(x.shape or ())
    rank = len(before)
    at = rank + axis
    if isinstance(size_in, int) and isinstance(size_out, int):
        starts, ends = _window_bounds(size_in, size_out)
        table = _equal_windows(size_in, size_out)
        inside = op.const(np.arange(table.shape[1]) < (ends - starts)[:, None])
        sizes, places = op.const((ends - starts).astype(np.float64), low.dtype), op.const(table)
    else:
        length, count = op.dim(x, at), low.ints(size_out)
        first = op.Range(0, low.int_scalar(size_out), 1)
        begins = op.Div(op.Mul(first, length), count)
        # ceil(a / b) = floor((a - 1) / b) + 1 for positive integers.
        stops = op.Add(op.Div(op.Sub(op.Mul(op.Add(first, 1), length), 1), count), 1)
        lengths = op.Sub(stops, begins)
        steps = op.Range(0, op.ReduceMax(lengths, keepdims=0), 1)
        inside = op.Less(steps, op.Unsqueeze(lengths, [1]))
        places = op.Add(op.Unsqueeze(begins, [1]), steps)
        places = op.Min(places, op.Unsqueeze(op.Sub(stops, 1), [1]))
        sizes = op.Cast(lengths, to=low.dtype)
    windows = op.Gather(x, places, axis=at)
    windows.shape = ir.Shape(
        [*before[:at], *low.shape(low.result)[axis : axis + 1 or None], None, *before[at + 1 :]]
    )
    behind = list(range(2, rank - at + 1))
    if behind:
        inside = op.Unsqueeze(inside, behind)
        sizes = op.Unsqueeze(sizes, [place - 1 for place in behind])
    # Zeros in place of the repeated elements of short windows, also where these are infinite.
    y = op.Div(op.ReduceSum(op.Where(inside, windows, 0.0), [at + 1], keepdims=0), sizes)
    y.shape = ir.Shape([*before[:at], *low.shape(low.result)[axis : axis + 1 or None], *before[at + 1 :]])
    return y
