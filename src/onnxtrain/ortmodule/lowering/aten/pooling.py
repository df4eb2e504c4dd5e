"""Lowers pooling, resizing and sampling of images.

Shapes are `[batch, channels, *spatial]`; the batch is optional in pooling.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.nn import functional

from onnxtrain.ortmodule.lowering._table import Lowering, lower
from onnxtrain.ortmodule.lowering.aten.indexing import counted
from onnxtrain.ortmodule.lowering.aten.shape import arange


def _interpolate(
    x: torch.Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """Computes `torch.nn.functional.interpolate` by one ATen op, where PyTorch's tracing would decompose it."""
    rank = x.dim() - 2
    # These compute other sizes or weights, which the ATen ops below do not have.
    if antialias or recompute_scale_factor or mode not in _UPSAMPLE:
        return functional.interpolate(
            x, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
        )
    factors: list[Any] = [None] * rank
    if scale_factor is not None:
        factors = [float(factor) for factor in _per_axis(scale_factor, rank)]
        size = [
            n * int(f) if f.is_integer() else torch.sym_int(n * f)  # type: ignore[no-untyped-call]
            for n, f in zip(x.shape[2:], factors, strict=True)
        ]
    corners = [] if mode.startswith("nearest") else [bool(align_corners)]
    op = getattr(torch.ops.aten, f"{_UPSAMPLE[mode]}{rank}d")
    return op.default(x, _per_axis(size, rank), *corners, *factors)


_UPSAMPLE = {
    "nearest": "upsample_nearest",
    "nearest-exact": "_upsample_nearest_exact",
    "linear": "upsample_linear",
    "bilinear": "upsample_bilinear",
    "bicubic": "upsample_bicubic",
    "trilinear": "upsample_trilinear",
}
INTERPOLATE: dict[Any, Callable[..., Any]] = {functional.interpolate: _interpolate}
"""Replacements by the function in a Dynamo graph, which is traced as its replacement instead."""


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
    """Lowers to MaxPool, with the position of each maximum in its plane if that is read."""
    rank = len(kernel)
    attributes = _windows(rank, kernel, stride, padding, ceil_mode)
    attributes["dilations"] = _per_axis(dilation, rank)
    if not low.uses_result(1):
        return _batched(low, x, rank, lambda x: low.op.MaxPool(x, **attributes)), None
    if len(low.fake(0).shape) != rank + 2:
        raise low.unsupported("indices of an input without batch axis")
    y, indices = low.op.MaxPool(x, **attributes, _outputs=2)
    # PyTorch counts positions within each plane, ONNX through the whole tensor.
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
    kernel, stride = _without_excess(low, kernel, stride, padding, ceil_mode)
    attributes = _windows(rank, kernel, stride, padding, ceil_mode)
    if divisor_override is not None and ceil_mode:
        _pad_for_last_window(low, attributes)
    # A divisor of its own makes PyTorch sum over padding too. The average times the size of the window is that sum.
    attributes["count_include_pad"] = int(count_include_pad or divisor_override is not None)
    y = _batched(low, x, rank, lambda x: low.op.AveragePool(x, **attributes))
    if divisor_override is None:
        return y
    return low.op.Mul(y, math.prod(kernel) / divisor_override)


@lower("aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default")
def adaptive_avg_pool(low: Lowering, x: ir.Value, sizes_out: list[Any]) -> ir.Value:
    """Lowers to ReduceMean for one position per plane, AveragePool for equal windows, else one MatMul per axis."""
    rank = len(sizes_out)
    if all(isinstance(n, int) and n == 1 for n in sizes_out):
        return low.op.ReduceMean(x, list(range(-rank, 0)), keepdims=1)
    sizes_in = list(low.fake(0).shape[-rank:])
    is_static = all(isinstance(n, int) for n in (*sizes_in, *sizes_out))
    if is_static and all(n % size_out == 0 for n, size_out in zip(sizes_in, sizes_out, strict=True)):
        kernel = [n // size_out for n, size_out in zip(sizes_in, sizes_out, strict=True)]
        return _batched(low, x, rank, lambda x: low.op.AveragePool(x, kernel_shape=kernel, strides=kernel))
    shape = low.op.shape_of(x)
    # Windows are the products of intervals along the axes, so that one axis is averaged after the other.
    for axis, size_out in zip(range(-rank, 0), sizes_out, strict=True):
        x = _averaged_along(low, x, axis, sizes_in[axis], size_out, shape)
    return x


def _averaged_along(
    low: Lowering, x: ir.Value, axis: int, size_in: Any, size_out: Any, input_shape: ir.Value
) -> ir.Value:
    """Pools one axis adaptively.

    Args:
        low: the lowering.
        x: the input, whose axes before `axis` are pooled already.
        axis: the axis to pool, counted from the end, e.g. -2.
        size_in: size of the axis, e.g. 7.
        size_out: its size after pooling, e.g. 3.
        input_shape: the shape of the input before any pooling, int64 [rank].
    """
    op, before = low.op, list(x.shape or ())
    is_static = isinstance(size_in, int) and isinstance(size_out, int)
    matrix = (
        op.const(_averages(size_in, size_out), low.dtype)
        if is_static
        else _symbolic_averages(low, x, axis, size_out)
    )
    after = [*before[:axis], *low.shape(low.result)[axis : axis + 1 or None], *before[axis:][1:]]
    if axis == -1:
        y = op.MatMul(x, op.Transpose(matrix, perm=[1, 0]))
    elif axis == -2:
        y = op.MatMul(matrix, x)
    else:
        rows = op.Reshape(x, op.Concat(op.Shape(x, end=len(before) + axis + 1), [-1], axis=0))
        behind = op.Slice(input_shape, [axis + 1], [np.iinfo(np.int64).max], [0])
        pooled = op.MatMul(matrix, rows)
        y = op.Reshape(pooled, op.Concat(op.Shape(pooled, end=-1), behind, axis=0))
    y.shape = ir.Shape(after)
    return y


@lower("aten.adaptive_max_pool2d.default", "aten.adaptive_max_pool3d.default")
def adaptive_max_pool(low: Lowering, x: ir.Value, sizes_out: list[int]) -> tuple[ir.Value, ir.Value | None]:
    """Lowers to a Gather that repeats the elements of overlapping windows, and a MaxPool of equal windows."""
    rank = len(sizes_out)
    if all(n == 1 for n in sizes_out) and not low.uses_result(1):
        return _batched(low, x, rank, lambda x: low.op.GlobalMaxPool(x)), None
    op, sizes_in = low.op, [low.known(n) for n in low.fake(0).shape[-rank:]]
    places = [_equal_windows(n, size_out) for n, size_out in zip(sizes_in, sizes_out, strict=True)]
    kernel = [place.shape[1] for place in places]
    shape = list(x.shape or ())
    for axis, (n, place) in enumerate(zip(sizes_in, places, strict=True)):
        if place.size != n:
            x = op.Gather(x, place.ravel(), axis=len(shape) - rank + axis)
            shape[axis - rank] = place.size
            x.shape = ir.Shape(shape)
    attributes = {"kernel_shape": kernel, "strides": kernel}
    if not low.uses_result(1):
        return _batched(low, x, rank, lambda x: op.MaxPool(x, **attributes)), None
    if len(shape) != rank + 2:
        raise low.unsupported("indices of an input without batch axis")
    y, indices = op.MaxPool(x, **attributes, _outputs=2)
    # ONNX counts positions through the whole tensor, PyTorch within each plane, in which no place is repeated.
    plane = np.arange(math.prod(sizes_in)).reshape(sizes_in)
    for axis, place in enumerate(places):
        plane = np.take(plane, place.ravel(), axis)
    return y, op.Gather(op.const(plane.ravel()), op.Mod(indices, plane.size))


def _equal_windows(size_in: int, size_out: int) -> np.ndarray:
    """Returns the places [size_out, length] of adaptive pooling's windows; a short window repeats its last place."""
    starts = np.arange(size_out) * size_in // size_out
    ends = -(-(np.arange(size_out) + 1) * size_in // size_out)
    steps = np.arange((ends - starts).max())
    return np.minimum(starts[:, None] + steps, ends[:, None] - 1)


@lower("aten.max_unpool2d.default", "aten.max_unpool3d.default")
def max_unpool(
    low: Lowering, x: ir.Value, indices: ir.Value, size: list[Any], *windows: list[int]
) -> ir.Value:
    """Lowers to a ScatterElements into planes of zeros; of several maxima for one place PyTorch keeps any."""
    op, lead = low.op, len(low.fake(0).shape) - len(size)
    sizes = low.ints(size)
    before = op.Shape(x, end=lead)
    rows = op.Concat(before, op.ReduceProd(op.Shape(x, start=lead), keepdims=1), axis=0)
    planes = op.Expand(op.const(0.0, low.dtype), op.Concat(before, op.ReduceProd(sizes, keepdims=1), axis=0))
    places = op.Reshape(counted(low, 1, indices), rows)
    written = op.ScatterElements(planes, places, op.Reshape(x, rows), axis=lead)
    return op.Reshape(written, op.Concat(before, sizes, axis=0))


@lower(
    "aten.upsample_nearest1d.default", "aten.upsample_nearest2d.default", "aten.upsample_nearest3d.default"
)
def upsample_nearest(low: Lowering, x: ir.Value, size: list[Any], *scales: float | None) -> ir.Value:
    how = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    without_scale = (1, 2) if len(size) == 2 else ()
    return _resize(low, x, size, scales, without_scale, mode="nearest", **how)


@lower(
    "aten._upsample_nearest_exact1d.default",
    "aten._upsample_nearest_exact2d.default",
    "aten._upsample_nearest_exact3d.default",
)
def upsample_nearest_exact(low: Lowering, x: ir.Value, size: list[Any], *scales: float | None) -> ir.Value:
    how = {"coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_ceil"}
    return _resize(low, x, size, scales, (), mode="nearest", **how)


@lower(
    "aten.upsample_linear1d.default", "aten.upsample_bilinear2d.default", "aten.upsample_trilinear3d.default"
)
def upsample_linear(
    low: Lowering, x: ir.Value, size: list[Any], align_corners: bool, *scales: float | None
) -> ir.Value:
    where = _corners(align_corners)
    return _resize(low, x, size, scales, (1,), mode="linear", coordinate_transformation_mode=where)


@lower("aten.upsample_bicubic2d.default")
def upsample_bicubic(
    low: Lowering, x: ir.Value, size: list[Any], align_corners: bool, *scales: float | None
) -> ir.Value:
    where = _corners(align_corners)
    return _resize(
        low, x, size, scales, (), mode="cubic", cubic_coeff_a=-0.75, coordinate_transformation_mode=where
    )


@lower("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def grid_sampler(
    low: Lowering, x: ir.Value, grid: ir.Value, mode: int, padding_mode: int, align_corners: bool
) -> ir.Value:
    if mode == 2:
        raise low.unsupported("bicubic sampling, which has no gradient rule")
    # ONNX's "linear" is PyTorch's "bilinear", for any number of axes.
    return low.op.GridSample(
        x,
        grid,
        mode=("linear", "nearest")[mode],
        padding_mode=("zeros", "border", "reflection")[padding_mode],
        align_corners=int(align_corners),
    )


def _corners(align: bool) -> str:
    return "align_corners" if align else "half_pixel"


def _resize(
    low: Lowering,
    x: ir.Value,
    size: list[Any],
    scales: tuple[float | None, ...],
    without_scale: tuple[int, ...],
    **attributes: Any,
) -> ir.Value:
    """Lowers to Resize by scales if PyTorch computes coordinates with scales, else to sizes.

    Args:
        low: lowers the node.
        x: the input.
        size: sizes of the output along the axes that are resized.
        scales: one scale per axis, or none.
        without_scale: ratios of the output's size to the input's with which eager PyTorch (2.13) ignores the scale of
            an axis. E.g. with 1 in it 3 rows are copied for a scale of 1.3, which also gives 3.
        attributes: those of Resize.
    """
    sizes_in, sizes_out = low.fake(0).shape[-len(size) :], low.result.shape[-len(size) :]
    axes = [*range(2, 2 + len(size))]
    # With aligned corners PyTorch never uses scales.
    aligned = attributes["coordinate_transformation_mode"] == "align_corners"
    factors = None if aligned else _scales(low, scales, sizes_in, sizes_out, without_scale)
    last = (None, low.ints(size)) if factors is None else (low.op.const(factors),)
    output: ir.Value = low.op.Resize(x, None, *last, axes=axes, **attributes)
    return output


def _scales(
    low: Lowering,
    scales: tuple[float | None, ...],
    sizes_in: Sequence[Any],
    sizes_out: Sequence[Any],
    without_scale: tuple[int, ...],
) -> np.ndarray | None:
    """Returns the scales that PyTorch computes coordinates with, float32 [rank]; None where it uses ratios of sizes."""
    if not scales or None in scales:
        return None
    factors = [float(scale or 0) for scale in scales]
    known = all(isinstance(n, int) for n in (*sizes_in, *sizes_out))
    for axis, ratio in itertools.product(range(len(factors)), without_scale):
        if known and sizes_out[axis] == ratio * sizes_in[axis]:
            factors[axis] = float(ratio)
        # A larger factor gives more than `ratio` times as many, but of a single element, whose copies are all the same.
        elif not known and ratio < factors[axis] < ratio + 0.5:
            raise low.unsupported(f"scale {factors[axis]} of sizes that are not known yet")
    # ONNX Runtime (1.32) copies an input whose sizes stay, whatever the scales are.
    if any(f != 1 for f in factors) and all(
        n == m if known else 1 <= f < 1.5 for n, m, f in zip(sizes_out, sizes_in, factors, strict=True)
    ):
        raise low.unsupported(f"scales {factors} that leave the sizes as they are")
    rounded = np.array(factors, np.float32)
    if known:
        # Scales equal to the ratios of sizes: the sizes say the same, without rounding.
        if [n / m for n, m in zip(sizes_out, sizes_in, strict=True)] == factors:
            return None
        # Scales of ONNX are float32, those of PyTorch float64: sizes may differ.
        exact = [int(m * f) for m, f in zip(sizes_in, rounded, strict=True)] == list(sizes_out)
    else:
        exact = rounded.astype(np.float64).tolist() == factors
    if not exact:
        raise low.unsupported(f"scales {factors}, which float32 cannot hold")
    return rounded


def _windows(rank: int, kernel: list[int], stride: Any, padding: Any, ceil_mode: bool) -> dict[str, Any]:
    """Returns the attributes of an ONNX pooling."""
    kernel = _per_axis(kernel, rank)
    pads = _per_axis(padding, rank)
    return {
        "kernel_shape": kernel,
        "strides": _per_axis(stride, rank) if stride else kernel,
        "pads": [*pads, *pads],
        "ceil_mode": int(ceil_mode),
    }


_LARGE = 32
"""Kernels up to this size are left as they are in ceil mode."""


def _without_excess(
    low: Lowering, kernel: list[int], stride: Any, padding: Any, ceil_mode: bool
) -> tuple[list[int], list[int]]:
    """Returns kernel and stride without the part of a window outside of the padded input.

    In ceil mode a kernel may be larger than the input, and one window averages all. Its gradient would multiply with a
    kernel that may need gigabytes, e.g. that of a pooling over `hidden_dim` places at the end of a network.
    """
    rank = len(kernel)
    strides = _per_axis(stride, rank) if stride else list(kernel)
    if not ceil_mode or max(kernel) <= _LARGE:
        return kernel, strides
    sizes_in = [low.known(n) for n in low.fake(0).shape[-rank:]]
    reach = [n + 2 * pad for n, pad in zip(sizes_in, _per_axis(padding, rank), strict=True)]
    strides = [step if k <= r else r for k, step, r in zip(kernel, strides, reach, strict=True)]
    return [min(k, r) for k, r in zip(kernel, reach, strict=True)], strides


def _pad_for_last_window(low: Lowering, attributes: dict[str, Any]) -> None:
    """Pads to the windows that PyTorch has in ceil mode, so that padding counts in all of them, for these sizes."""
    rank = len(attributes["kernel_shape"])
    sizes = zip(low.fake(0).shape[-rank:], low.result.shape[-rank:], strict=True)
    for axis, (size_in, size_out) in enumerate(sizes):
        last = (low.known(size_out) - 1) * attributes["strides"][axis] + attributes["kernel_shape"][axis]
        attributes["pads"][rank + axis] = max(0, last - low.known(size_in) - attributes["pads"][axis])
    attributes["ceil_mode"] = 0


def _per_axis(numbers: Any, rank: int) -> list[int]:
    items = list(numbers) if isinstance(numbers, list | tuple) else [numbers]
    return items * rank if len(items) == 1 else items


def _batched(low: Lowering, x: ir.Value, rank: int, pool: Callable[[ir.Value], ir.Value]) -> ir.Value:
    """Applies `pool` to an input that may lack its batch axis, which ONNX requires."""
    if len(low.fake(0).shape) == rank + 2:
        return pool(x)
    batch = low.op.Unsqueeze(x, [0])
    batch.shape = ir.Shape([1, *(x.shape or ())])
    y = pool(batch)
    fake = low.result[0] if isinstance(low.result, tuple) else low.result
    y.shape = ir.Shape([1, *low.shape(fake)])
    return low.op.Squeeze(y, [0])


def _averages(size_in: int, size_out: int) -> np.ndarray:
    """Returns the matrix [size_out, size_in] of adaptive average pooling. Row i averages the i-th window."""
    matrix = np.zeros((size_out, size_in))
    for i in range(size_out):
        start, end = i * size_in // size_out, -(-(i + 1) * size_in // size_out)
        matrix[i, start:end] = 1 / (end - start)
    return matrix


def _symbolic_averages(low: Lowering, x: ir.Value, axis: int, size_out: Any) -> ir.Value:
    """Returns the matrix of `_averages` for sizes that are known at run time."""
    op = low.op
    length = op.dim(x, len(x.shape or ()) + axis)
    count = low.ints(size_out)
    first = op.Range(0, low.int_scalar(size_out), 1)
    starts = op.Unsqueeze(op.Div(op.Mul(first, length), count), [1])
    # ceil(a / b) = floor((a - 1) / b) + 1 for positive integers.
    ends = op.Sub(op.Mul(op.Add(first, 1), length), 1)
    ends = op.Unsqueeze(op.Add(op.Div(ends, count), 1), [1])
    places = arange(low, length)
    inside = op.And(op.GreaterOrEqual(places, starts), op.Less(places, ends))
    weights = op.Div(op.Cast(inside, to=low.dtype), op.Cast(op.Sub(ends, starts), to=low.dtype))
    weights.shape = ir.Shape(
        [*low.shape(low.result)[axis : axis + 1 or None], *(x.shape or ())[axis : axis + 1 or None]]
    )
    return weights
