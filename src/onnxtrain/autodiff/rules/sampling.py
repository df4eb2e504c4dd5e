"""Ops that read an image at positions that are data: sampling grids and regions of interest."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import Cotangents, vjp
from onnxtrain.autodiff.rules._scatter import positions, scatter_to
from onnxtrain.emitter import Emitter
from onnxtrain.errors import DifferentiationError


@dataclass(frozen=True)
class _Axis:
    """Where the samples lie on one axis of the image; values are `[batch, 1, samples]`, in the grid's dtype.

    Attributes:
        low: the pixel at or before each sample; `weight` how far the sample is on the way to the next one.
        slope: derivative of the position of the sample in the grid's value.
        last: index of the last pixel.
    """

    low: ir.Value
    weight: ir.Value | None
    slope: ir.Value
    last: ir.Value


@vjp("GridSample", wrt=("X", "grid"))
def grid_sample(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """Each sample is a sum of the pixels around it, weighted by how far each is along every axis.

    At kinks of the padding as torch: no gradient for samples on or beyond the border.
    """
    if n.attr("mode") not in ("linear", "nearest"):
        raise DifferentiationError(
            f"differentiating GridSample (node {n.node.name!r}): mode {n.attr('mode')!r} has no gradient "
            "yet; use 'linear'"
        )
    rank = n.rank(n.X) - 2
    axes = [_axis(op, n, axis, rank) for axis in range(rank)]
    flat_ct, flat_x = op.merge_from(ct, 2), op.merge_from(n.X, 2)
    corners = list(itertools.product((0, 1) if n.attr("mode") == "linear" else (0,), repeat=rank))
    pixels = [_pixel(op, n, axes, corner) for corner in corners]
    full = op.Shape(flat_ct)
    ct_x = None
    if n.needs("X"):
        updates = []
        for corner, (_, inside) in zip(corners, pixels, strict=True):
            weight = _product(op, [*_weights(op, axes, corner), *([inside] if inside else [])])
            updates.append(op.Mul(flat_ct, _as(op, weight, ct)) if weight is not None else flat_ct)
        where = [op.Expand(index, full) for index, _ in pixels]
        zeros = op.merge_from(op.zeros_like(n.X), 2)
        total = op.ScatterElements(
            zeros, op.Concat(*where, axis=2), op.Concat(*updates, axis=2), axis=2, reduction="add"
        )
        ct_x = op.reshape_like(total, n.X)
    if not n.needs("grid") or n.attr("mode") == "nearest":  # the nearest pixel is piecewise constant
        return {"X": ct_x, "grid": None}
    values = []
    for index, inside in pixels:
        pixel = op.GatherElements(flat_x, op.Expand(index, full), axis=2)
        value = _as(op, op.ReduceSum(op.Mul(flat_ct, pixel), [1], keepdims=1), n.grid)
        values.append(value if inside is None else op.Mul(value, inside))
    slopes = [_slope(op, axes, axis, corners, values) for axis in reversed(range(rank))]
    ct_grid = op.Transpose(op.Concat(*slopes, axis=1), perm=[0, 2, 1])
    return {"X": ct_x, "grid": op.reshape_like(ct_grid, n.grid)}


def _axis(op: Emitter, n: NodeView, axis: int, rank: int) -> _Axis:
    """Locates the samples on spatial axis `axis`; the grid has the last axis first."""
    grid = op.Unsqueeze(op.merge_from(op.Gather(n.grid, rank - 1 - axis, axis=-1), 1), [1])
    size = op.Cast(op.dim(n.X, 2 + axis), to=n.grid.dtype)
    last = op.Sub(size, 1.0)
    # From -1 .. 1 to 0 .. size - 1 or, where that is the border of the border pixels, -1/2 .. size - 1/2.
    slope = op.Mul(last if n.attr("align_corners") else size, 0.5)
    where = op.Add(op.Mul(grid, slope), op.Mul(last, 0.5))
    if n.attr("padding_mode") == "reflection":
        where, sign = _reflected(op, where, size, last, bool(n.attr("align_corners")))
        slope = op.Mul(sign, slope)
    if n.attr("padding_mode") != "zeros":
        inside = op.And(op.Greater(where, 0.0), op.Less(where, last))
        slope = op.Mul(op.Cast(inside, to=n.grid.dtype), slope)
        where = op.Min(op.Max(where, 0.0), last)
    if n.attr("mode") == "nearest":
        return _Axis(op.Round(where), None, slope, last)
    low = op.Floor(where)
    return _Axis(low, op.Sub(where, low), slope, last)


def _reflected(
    op: Emitter, where: ir.Value, size: ir.Value, last: ir.Value, align: bool
) -> tuple[ir.Value, ir.Value]:
    """Returns positions reflected at the borders until between them, and the sign of the derivative."""
    begin, span = (0.0, op.Max(last, 1.0)) if align else (-0.5, size)
    offset = op.Sub(where, begin)
    distance = op.Abs(offset)
    flips = op.Floor(op.Div(distance, span))
    rest = op.Sub(distance, op.Mul(flips, span))
    odd = op.Greater(op.Sub(flips, op.Mul(op.Floor(op.Mul(flips, 0.5)), 2.0)), 0.5)
    inner = op.Add(op.Where(odd, op.Sub(span, rest), rest), begin)
    sign = op.Where(op.Less(offset, 0.0), op.const(-1.0, like=where), op.const(1.0, like=where))
    return inner, op.Where(odd, op.Neg(sign), sign)


def _pixel(
    op: Emitter, n: NodeView, axes: Sequence[_Axis], corner: Sequence[int]
) -> tuple[ir.Value, ir.Value | None]:
    """Returns the flat index of a pixel at each sample and, for zero padding, whether it exists (1 or 0)."""
    flat, inside = None, []
    for axis, (place, step) in enumerate(zip(axes, corner, strict=True)):
        index = op.Add(place.low, float(step)) if step else place.low
        if n.attr("padding_mode") == "zeros":
            exists = op.And(op.GreaterOrEqual(index, 0.0), op.LessOrEqual(index, place.last))
            inside.append(op.Cast(exists, to=n.grid.dtype))
        index = op.Cast(op.Min(op.Max(index, 0.0), place.last), to=ir.DataType.INT64)
        flat = index if flat is None else op.Add(op.Mul(flat, op.dim(n.X, 2 + axis)), index)
    assert flat is not None
    return flat, _product(op, inside)


def _weights(op: Emitter, axes: Sequence[_Axis], corner: Sequence[int]) -> list[ir.Value]:
    """Returns the weight of a pixel along each axis."""
    return [
        place.weight if step else op.Sub(1.0, place.weight)
        for place, step in zip(axes, corner, strict=True)
        if place.weight is not None
    ]


def _slope(
    op: Emitter,
    axes: Sequence[_Axis],
    axis: int,
    corners: Sequence[Sequence[int]],
    values: Sequence[ir.Value],
) -> ir.Value:
    """Returns the derivative in the grid along one axis; `values` are those in the corners' weights."""
    total = None
    for corner, value in zip(corners, values, strict=True):
        others = [w for i, w in enumerate(_weights(op, axes, corner)) if i != axis]
        term = _product(op, [value, *others])
        term = term if corner[axis] else op.Neg(term)
        total = term if total is None else op.Add(total, term)
    return op.Mul(total, axes[axis].slope)


def _product(op: Emitter, values: Sequence[ir.Value]) -> ir.Value | None:
    return functools.reduce(op.Mul, values) if values else None


def _as(op: Emitter, value: ir.Value, like: ir.Value) -> ir.Value:
    return value if value.dtype == like.dtype else op.Cast(value, to=like.dtype)


@vjp("AffineGrid", wrt=("theta",))
def affine_grid(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """grid[p] = theta · (base[p], 1), where the base grid is that of the identity."""
    (rank,) = n.static(n.theta, [1])
    identity = op.const(np.eye(rank, rank + 1)[None], like=ct)
    one = op.Concat([1], op.Slice(n.size, [1], [rank + 2]), axis=0)
    base = op.Reshape(op.AffineGrid(identity, one, align_corners=n.attr("align_corners")), [-1, rank])
    homogeneous = op.Pad(base, [0, 0, 0, 1], 1.0)
    flat = op.Reshape(ct, op.Concat(op.dim(ct, 0), op.dim(base, 0), [rank], axis=0), allowzero=1)
    return op.MatMul(op.Transpose(flat, perm=[0, 2, 1]), homogeneous)


@vjp("MaxRoiPool", wrt=("X",))
def max_roi_pool(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """Each bin of a region passes its cotangent to its maximum, of several to the first one.

    Bins as in Girshick, "Fast R-CNN", 2015. Takes memory for every pixel of the image in every bin.
    """
    batch = op.Cast(op.Gather(n.rois, 0, axis=1), to=ir.DataType.INT64)
    pooled = n.attr("pooled_shape")
    rows = _bins(op, n, begin=2, pooled=pooled[0], axis=2)  # [regions, bins, height]
    columns = _bins(op, n, begin=1, pooled=pooled[1], axis=3)
    inside = op.And(op.Unsqueeze(rows, [1, 3, 5]), op.Unsqueeze(columns, [1, 2, 4]))
    images = op.Unsqueeze(op.Gather(n.X, batch, axis=0), [2, 3])
    shown = op.Where(inside, images, -np.inf)
    first = op.ArgMax(op.merge_from(shown, 4), axis=4, keepdims=0)
    places = op.merge_from(op.Gather(positions(op, n.X), batch, axis=0), 2)
    where = op.GatherElements(places, op.merge_from(first, 2), axis=2)
    some = op.ReduceMax(op.Cast(inside, to=ct.dtype), [4, 5], keepdims=0)
    return scatter_to(op, op.Mul(ct, some), where, n.X)


def _bins(op: Emitter, n: NodeView, *, begin: int, pooled: int, axis: int) -> ir.Value:
    """Returns which positions of an image axis lie in each bin: bool [regions, bins, size]."""

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
