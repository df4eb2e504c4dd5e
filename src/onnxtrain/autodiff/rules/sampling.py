"""Differentiates ops that read an image at computed positions: sampling grids and regions of interest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import Cotangents, vjp
from onnxtrain.autodiff.rules._interpolation import (
    Place,
    corners,
    cubic_place_at,
    pixel,
    place_at,
    product,
    slopes,
    weights,
)
from onnxtrain.autodiff.rules._scatter import positions, scatter_nd, scatter_to
from onnxtrain.emitter import Emitter


@vjp("GridSample", wrt=("X", "grid"))
def grid_sample(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of GridSample: each sample is a weighted sum of the surrounding pixels.

    As in PyTorch, with padding_mode "border" or "reflection", the grid gets no gradient from samples that are clipped
    to the image or lie on its border. In cubic mode, samples are not clipped: each of the four pixels along an axis is
    padded instead.
    """
    rank = n.rank(n.X) - 2
    places, slope = zip(*(_samples_on_axis(op, n, axis, rank) for axis in range(rank)), strict=True)
    flat_ct, flat_x = op.merge_from(ct, 2), op.merge_from(n.X, 2)
    cell, zeros = corners(places), n.attr("padding_mode") == "zeros"
    pixels = [pixel(op, places, corner, zeros=zeros) for corner in cell]
    full = op.Shape(flat_ct)
    ct_x = None
    if n.needs("X"):
        updates = []
        for corner, (_, inside) in zip(cell, pixels, strict=True):
            weight = product(op, [*weights(op, places, corner), *([inside] if inside else [])])
            updates.append(op.Mul(flat_ct, _as(op, weight, ct)) if weight is not None else flat_ct)
        where = [op.Expand(index, full) for index, _ in pixels]
        empty = op.merge_from(op.zeros_like(n.X), 2)
        total = op.ScatterElements(
            empty, op.Concat(*where, axis=2), op.Concat(*updates, axis=2), axis=2, reduction="add"
        )
        ct_x = op.reshape_like(total, n.X)
    # In mode nearest, a sample is piecewise constant in its position.
    if not n.needs("grid") or n.attr("mode") == "nearest":
        return {"X": ct_x, "grid": None}
    values = []
    for index, inside in pixels:
        read = op.GatherElements(flat_x, op.Expand(index, full), axis=2)
        value = _as(op, op.ReduceSum(op.Mul(flat_ct, read), [1], keepdims=1), n.grid)
        values.append(value if inside is None else op.Mul(value, inside))
    moved = [op.Mul(*pair) for pair in zip(slopes(op, places, values), slope, strict=True)]
    ct_grid = op.Transpose(op.Concat(*reversed(moved), axis=1), perm=[0, 2, 1])
    return {"X": ct_x, "grid": op.reshape_like(ct_grid, n.grid)}


def _samples_on_axis(op: Emitter, n: NodeView, axis: int, rank: int) -> tuple[Place, ir.Value]:
    """Computes the positions of the samples along spatial axis `axis`, 0 to `rank` - 1: `[batch, 1, samples]`.

    Returns:
        The places of the samples, and the derivatives of their positions with respect to the grid.
    """
    # The last axis of the grid holds x before y, i.e. the last spatial axis first.
    grid = op.Unsqueeze(op.merge_from(op.Gather(n.grid, rank - 1 - axis, axis=-1), 1), [1])
    count = op.dim(n.X, 2 + axis)
    size = op.Cast(count, to=n.grid.dtype)
    last = op.Sub(size, 1.0)
    # -1 and 1 are the centers of the border pixels with align_corners, i.e. positions 0 and size - 1, otherwise their
    # outer edges, -1/2 and size - 1/2.
    slope = op.Mul(last if n.attr("align_corners") else size, 0.5)
    where = op.Add(op.Mul(grid, slope), op.Mul(last, 0.5))
    if n.attr("mode") == "cubic":

        def into_image(index: ir.Value) -> ir.Value:
            if n.attr("padding_mode") != "reflection":
                return index
            return _reflected(op, index, size, last, bool(n.attr("align_corners")))[0]

        return cubic_place_at(op, where, count, into_image), slope
    if n.attr("padding_mode") == "reflection":
        where, sign = _reflected(op, where, size, last, bool(n.attr("align_corners")))
        slope = op.Mul(sign, slope)
    if n.attr("padding_mode") != "zeros":
        inside = op.And(op.Greater(where, 0.0), op.Less(where, last))
        slope = op.Mul(op.Cast(inside, to=n.grid.dtype), slope)
        where = op.Min(op.Max(where, 0.0), last)
    if n.attr("mode") == "nearest":
        return Place(op.Round(where), None, count, last), slope
    return place_at(op, where, count), slope


def _reflected(
    op: Emitter, where: ir.Value, size: ir.Value, last: ir.Value, align: bool
) -> tuple[ir.Value, ir.Value]:
    """Reflects positions at the borders until they lie within the image.

    Args:
        op: emitter.
        where: positions along an axis.
        size: number of pixels, floating point.
        last: index of the last pixel, floating point.
        align: True reflects at the centers of the border pixels, False at their outer edges.

    Returns:
        The reflected positions, and their derivatives with respect to `where`: 1 or -1.
    """
    # The borders of a one-pixel image coincide: use 1 to avoid a division by zero.
    begin, span = (0.0, op.Max(last, 1.0)) if align else (-0.5, size)
    offset = op.Sub(where, begin)
    distance = op.Abs(offset)
    flips = op.Floor(op.Div(distance, span))
    rest = op.Sub(distance, op.Mul(flips, span))
    odd = op.Greater(op.Sub(flips, op.Mul(op.Floor(op.Mul(flips, 0.5)), 2.0)), 0.5)
    inner = op.Add(op.Where(odd, op.Sub(span, rest), rest), begin)
    sign = op.Where(op.Less(offset, 0.0), op.const(-1.0, like=where), op.const(1.0, like=where))
    return inner, op.Where(odd, op.Neg(sign), sign)


def _as(op: Emitter, value: ir.Value, like: ir.Value) -> ir.Value:
    return value if value.dtype == like.dtype else op.Cast(value, to=like.dtype)


@vjp("AffineGrid", wrt=("theta",))
def affine_grid(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of grid[p] = theta · (base[p], 1): ct_theta = sum_p ct[p] (base[p], 1)ᵀ.

    `base` is the grid of the identity transform.
    """
    (rank,) = n.static(n.theta, [1])
    # The op itself computes the base grid, so that align_corners and the order of axes are handled.
    identity = op.const(np.eye(rank, rank + 1)[None], like=ct)
    one = op.Concat([1], op.Slice(n.size, [1], [rank + 2]), axis=0)
    base = op.Reshape(op.AffineGrid(identity, one, align_corners=n.attr("align_corners")), [-1, rank])
    homogeneous = op.Pad(base, [0, 0, 0, 1], 1.0)
    flat = op.Reshape(ct, op.Concat(op.dim(ct, 0), op.dim(base, 0), [rank], axis=0), allowzero=1)
    return op.MatMul(op.Transpose(flat, perm=[0, 2, 1]), homogeneous)


@vjp("MaxRoiPool", wrt=("X",))
def max_roi_pool(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of MaxRoiPool: each bin of a region passes its cotangent to its maximum, the first one in case of ties.

    Bins are defined as in Girshick, "Fast R-CNN", 2015. Regions are rounded to pixels, so their derivative is zero. The
    backward pass needs memory for every pixel of the image in every bin.
    """
    batch = op.Cast(op.Gather(n.rois, 0, axis=1), to=ir.DataType.INT64)
    pooled = n.attr("pooled_shape")
    # Shapes [regions, bins, height] and [regions, bins, width].
    rows = _bins(op, n, begin=2, pooled=pooled[0], axis=2)
    columns = _bins(op, n, begin=1, pooled=pooled[1], axis=3)
    inside = op.And(op.Unsqueeze(rows, [1, 3, 5]), op.Unsqueeze(columns, [1, 2, 4]))
    images = op.Unsqueeze(op.Gather(n.X, batch, axis=0), [2, 3])
    shown = op.Where(inside, images, -np.inf)
    first = op.ArgMax(op.merge_from(shown, 4), axis=4, keepdims=0)
    places = op.merge_from(op.Gather(positions(op, n.X), batch, axis=0), 2)
    where = op.GatherElements(places, op.merge_from(first, 2), axis=2)
    # A bin outside of the image is empty: its output is constant.
    some = op.ReduceMax(op.Cast(inside, to=ct.dtype), [4, 5], keepdims=0)
    return {"X": scatter_to(op, op.Mul(ct, some), where, n.X)}


def _bins(op: Emitter, n: NodeView, *, begin: int, pooled: int, axis: int) -> ir.Value:
    """Returns a mask, bool [regions, bins, size], of the positions along an image axis that lie in each bin.

    Args:
        op: emitter.
        n: the node.
        begin: column of `rois` with the first position, 1 or 2.
        pooled: number of bins.
        axis: axis of the image.
    """

    def corner(column: int) -> ir.Value:
        scaled = op.Mul(op.Gather(n.rois, [column], axis=1), n.attr("spatial_scale"))
        return op.Floor(op.Add(scaled, 0.5))

    first = corner(begin)
    extent = op.Max(op.Add(op.Sub(corner(begin + 2), first), 1.0), 1.0)
    size = op.Mul(extent, 1 / pooled)
    count = op.const(np.arange(pooled), like=first)
    low = op.Add(op.Floor(op.Mul(size, count)), first)
    high = op.Add(op.Ceil(op.Mul(size, op.Add(count, 1.0))), first)
    place = op.Cast(op.Range(0, op.Squeeze(op.dim(n.X, axis)), 1), to=first.dtype)
    after = op.GreaterOrEqual(place, op.Unsqueeze(low, [2]))
    return op.And(after, op.Less(place, op.Unsqueeze(high, [2])))


@dataclass(frozen=True)
class _Side:
    """Samples of regions along one axis; values have the shape `[regions, bins, samples]`.

    Attributes:
        place: position of each sample, clamped to the image.
        counts: 1 for samples that belong to the region, 0 for the rest, because regions have different numbers of
            samples.
        number: number of samples of each region, `[regions, 1]`.
        inside: 1 for samples at most one pixel outside the image, 0 for others, whose value is zero.
    """

    place: Place
    counts: ir.Value
    number: ir.Value
    inside: ir.Value


@vjp("RoiAlign", wrt=("X",))
def roi_align(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of RoiAlign: each bin is the mean of interpolated samples; He et al., "Mask R-CNN", 2017.

    In mode `max`, as ONNX defines it, a bin is the largest product of a pixel and its interpolation weight; it passes
    its cotangent to that pixel, the first one in case of ties. The regions get no gradient, as in torchvision.
    """
    rows, columns = _samples_along(op, n, 0), _samples_along(op, n, 1)
    # From here on, values are [regions, bins, samples, bins, samples], rows before columns, and then channels.
    spread = ([3, 4], [1, 2])
    places = [
        Place(op.Unsqueeze(s.place.low, axes), op.Unsqueeze(s.place.weight, axes), s.place.size, s.place.last)
        for s, axes in zip((rows, columns), spread, strict=True)
    ]
    counts, inside = (
        op.Mul(op.Unsqueeze(down, [3, 4]), op.Unsqueeze(across, [1, 2]))
        for down, across in ((rows.counts, columns.counts), (rows.inside, columns.inside))
    )
    area = op.Mul(rows.place.size, columns.place.size)
    begin = op.Reshape(op.Mul(op.Cast(n.batch_indices, to=ir.DataType.INT64), area), [-1, 1, 1, 1, 1])
    cell = corners(places)
    indices = [op.Add(pixel(op, places, corner, zeros=False)[0], begin) for corner in cell]
    kept = op.Mul(counts, inside)
    factors = [op.Unsqueeze(product(op, [*weights(op, places, corner), kept]), [5]) for corner in cell]
    pixels = op.Transpose(n.X, perm=[0, 2, 3, 1])
    shape = op.Concat(op.Mul(op.dim(n.X, 0), area), op.dim(n.X, 1), axis=0)
    last = op.Transpose(ct, perm=[0, 2, 3, 1])
    if n.attr("mode") == "avg":
        # An empty region has no samples, and a mean of 0.
        number = op.Max(op.Mul(rows.number, columns.number), 1.0)
        share = op.Unsqueeze(op.Div(last, op.Reshape(number, [-1, 1, 1, 1])), [2, 4])
        updates = op.Concat(*(op.Mul(share, factor) for factor in factors), axis=0)
        total = scatter_nd(op, shape, op.Unsqueeze(op.Concat(*indices, axis=0), [5]), updates)
    else:
        image = op.Reshape(pixels, shape, allowzero=1)
        total = _scatter_to_largest(op, last, image, indices, factors, op.Unsqueeze(counts, [5]))
    back = op.Reshape(total, op.Shape(pixels), allowzero=1)
    return {"X": op.Transpose(back, perm=[0, 3, 1, 2])}


def _samples_along(op: Emitter, n: NodeView, axis: int) -> _Side:
    """Computes where RoiAlign samples each region, along the rows (axis 0) or the columns (axis 1) of the image."""
    half = n.attr("coordinate_transformation_mode") == "half_pixel"
    bins, ratio = n.attr(("output_height", "output_width")[axis]), n.attr("sampling_ratio")
    begin, end = (
        op.Sub(op.Mul(op.Gather(n.rois, [column], axis=1), n.attr("spatial_scale")), 0.5 if half else 0.0)
        for column in (1 - axis, 3 - axis)
    )
    # Shape [regions, 1] from here on.
    extent = op.Sub(end, begin)
    size = op.Div(extent if half else op.Max(extent, 1.0), float(bins))
    like = op.Mul(size, 0.0)
    number = op.Add(like, float(ratio)) if ratio else op.Ceil(size)
    if ratio:
        most = op.const(ratio)
    else:
        # The number of samples of the largest region; one additional entry, because the maximum over no regions is
        # undefined.
        some = op.ReduceMax(
            op.Concat(op.Reshape(number, [-1]), op.const([1.0], like=number), axis=0), keepdims=0
        )
        most = op.Cast(some, to=ir.DataType.INT64)
    sample = op.Cast(op.Range(0, most, 1), to=number.dtype)
    step = op.Div(size, op.Max(number, 1.0))
    # Shapes [regions, bins] and [regions, samples].
    first = op.Add(begin, op.Mul(size, op.const(np.arange(bins), like=size)))
    within = op.Mul(op.Add(sample, 0.5), step)
    where = op.Add(op.Unsqueeze(first, [2]), op.Unsqueeze(within, [1]))
    count = op.dim(n.X, 2 + axis)
    pixels = op.Cast(count, to=where.dtype)
    # Samples up to one pixel beyond the border are clamped to it, others are zero, as in He et al.'s code and ONNX
    # Runtime.
    near = op.And(op.GreaterOrEqual(where, -1.0), op.LessOrEqual(where, pixels))
    place = place_at(op, op.Min(op.Max(where, 0.0), op.Sub(pixels, 1.0)), count)
    counts = op.Unsqueeze(op.Cast(op.Less(sample, number), to=where.dtype), [1])
    return _Side(place, counts, number, op.Cast(near, to=where.dtype))


def _scatter_to_largest(
    op: Emitter,
    ct: ir.Value,
    image: ir.Value,
    indices: Sequence[ir.Value],
    factors: Sequence[ir.Value],
    counts: ir.Value,
) -> ir.Value:
    """Adds the cotangents of bins to the pixels with the largest product of pixel and interpolation weight.

    Args:
        op: emitter.
        ct: cotangents of bins, `[regions, rows, columns, channels]`.
        image: pixels, `[pixels, channels]`.
        indices: for each corner, the pixel of each sample, `[regions, rows, samples, columns, samples]`.
        factors: for each corner, the weight of that pixel, `[regions, rows, samples, columns, samples, 1]`.
        counts: 1 for samples that belong to a region, else 0; has the shape of a factor.
    """

    def together(values: Sequence[ir.Value]) -> ir.Value:
        """Stacks the corners' values as `[regions, rows, columns, channels, corners * samples * samples]`."""
        stack = op.Concat(*(op.Unsqueeze(value, [6]) for value in values), axis=6)
        return op.merge_from(op.Transpose(stack, perm=[0, 1, 3, 5, 2, 4, 6]), 4)

    values = [
        op.Where(op.Greater(counts, 0.0), op.Mul(op.Gather(image, index, axis=0), factor), -np.inf)
        for index, factor in zip(indices, factors, strict=True)
    ]
    products = together(values)
    first = op.ArgMax(products, axis=4, keepdims=1)
    weight, place = (
        op.Squeeze(op.GatherElements(op.Expand(together(each), op.Shape(products)), first, axis=4), [4])
        for each in (factors, [op.Unsqueeze(index, [5]) for index in indices])
    )
    channels = op.dim(image, 1)
    where = op.Add(op.Mul(place, channels), op.Range(0, op.Reshape(channels, []), 1))
    return scatter_to(op, op.Mul(ct, weight), where, image)
