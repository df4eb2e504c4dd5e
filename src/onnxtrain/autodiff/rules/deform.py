"""Differentiates deformable convolution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import Cotangents, vjp
from onnxtrain.autodiff.rules._interpolation import Place, corners, pixel, place_at, product, slopes, weights
from onnxtrain.autodiff.rules._scatter import scatter_nd
from onnxtrain.emitter import Emitter

_Sizes = Sequence[ir.Value | list[int] | None]
"""Sizes of axes, each a list with one integer, or an int64 [1] value if known only at run time."""


@dataclass(frozen=True)
class _Samples:
    """Samples read by the taps of all windows. A sample is interpolated between the corners, the pixels around it.

    Values for all samples have the shape `[batch, offset groups, taps, *counts]`.

    Attributes:
        places: positions of all samples, one entry per spatial axis.
        indices: for each corner, the row of `rows` that each sample reads.
        factors: for each corner, its interpolation weight in each sample; 0 outside the image.
        inside: for each corner, 1 where it is inside the image, 0 outside.
        rows: the pixels of all images and offset groups, `[pixels, channels]`.
    """

    places: list[Place]
    indices: list[ir.Value]
    factors: list[ir.Value]
    inside: list[ir.Value]
    rows: ir.Value


@vjp("DeformConv", wrt=("X", "W", "offset", "B", "mask"))
def deform_conv(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Y = W · (mask * samples) + B.

    Each sample is interpolated between the pixels around its tap's position, which is shifted by `offset`. The image is
    padded with zeros. A sample exactly on a pixel gets the slope towards the next pixel, as in torchvision.
    """
    shape = n.static(n.W)
    spatial, taps, channels = len(shape) - 2, math.prod(shape[2:]), shape[1] * n.attr("group")
    groups, deform = n.attr("group"), n.attr("offset_group")
    batch, counts = op.dim(n.X, 0), [op.dim(n.out.Y, 2 + axis) for axis in range(spatial)]
    grid: _Sizes = [batch, [deform], [taps], *counts]
    s = _compute_samples(op, n, shape[2:], grid, channels // deform)
    reads = [op.Gather(s.rows, index, axis=0) for index in s.indices]
    columns: _Sizes = [batch, [groups], [shape[1] * taps], product(op, counts)]
    flat_ct = _reshaped(op, ct, [batch, [groups], [shape[0] // groups], product(op, counts)])
    # Channels become the last axis, because Gather reads whole rows of channels; `first` moves them back.
    last = [0, 1, *range(3, 4 + spatial), 2]
    first = [0, 1, 3 + spatial, *range(2, 3 + spatial)]
    mask = None if n.mask is None else op.Unsqueeze(_reshaped(op, n.mask, grid), [-1])

    # The interpolated samples are recomputed, and only if needed for the weight or the mask.
    ct_w = value = None
    if n.needs("W") or n.needs("mask"):
        value = op.Sum(*(op.Mul(r, op.Unsqueeze(f, [-1])) for r, f in zip(reads, s.factors, strict=True)))
    if n.needs("W"):
        masked = value if mask is None else op.Mul(value, mask)
        read = _reshaped(op, op.Transpose(masked, perm=first), columns)
        ct_w = op.MatMul(flat_ct, op.Transpose(read, perm=[0, 1, 3, 2]))
        # The product is per sample, but all samples share the weight.
        ct_w = op.Reshape(op.ReduceSum(ct_w, [0], keepdims=0), list(shape))
    ct_x = ct_offset = ct_mask = None
    if n.needs("X") or n.needs("offset") or n.needs("mask"):
        weight = op.Reshape(n.W, [groups, shape[0] // groups, shape[1] * taps])
        back = op.MatMul(op.Transpose(weight, perm=[0, 2, 1]), flat_ct)
        back = _reshaped(op, back, [batch, [deform], [channels // deform], [taps], *counts])
        back = op.Transpose(back, perm=last)
        if n.needs("mask"):
            ct_mask = op.reshape_like(op.ReduceSum(op.Mul(back, value), [-1], keepdims=0), n.mask)
        back = back if mask is None else op.Mul(back, mask)
        ct_x = _image_cotangent(op, n, s, back, channels // deform) if n.needs("X") else None
        ct_offset = _offset_cotangent(op, n, s, back, reads) if n.needs("offset") else None
    ct_b = op.ReduceSum(ct, [0, *range(2, 2 + spatial)], keepdims=0) if n.needs("B") else None
    return {"X": ct_x, "W": ct_w, "offset": ct_offset, "B": ct_b, "mask": ct_mask}


def _compute_samples(
    op: Emitter,
    n: NodeView,
    kernel: Sequence[int],
    grid: _Sizes,
    channels: int,
) -> _Samples:
    """Computes the positions of the samples, i.e. of the taps shifted by `offset`, and the pixels around them.

    Args:
        op: emitter.
        n: the node.
        kernel: sizes of the kernel, e.g. (3, 3).
        grid: shape of all samples, [batch, offset groups, taps, *counts].
        channels: number of channels per offset group.
    """
    spatial = len(kernel)
    strides, dilations, pads = (
        n.attr(name) or [default] * spatial
        for name, default in (("strides", 1), ("dilations", 1), ("pads", 0))
    )
    offsets = _reshaped(op, n.offset, [*grid[:3], [spatial], *grid[3:]])
    tap_places = np.indices(kernel).reshape(spatial, -1)
    sizes = [op.dim(n.X, 2 + axis) for axis in range(spatial)]
    places = []
    for axis in range(spatial):
        count = op.Reshape(op.dim(n.out.Y, 2 + axis), [])
        window = op.Sub(op.Mul(op.Range(0, count, 1), [strides[axis]]), [pads[axis]])
        window = op.Reshape(window, [-1] + [1] * (spatial - 1 - axis))
        tap = op.const((tap_places[axis] * dilations[axis]).reshape(-1, *[1] * spatial))
        regular = op.Cast(op.Add(tap, window), to=n.offset.dtype)
        # The schema stores a tap's offsets axis by axis.
        moved = op.Add(op.Gather(offsets, axis, axis=3), regular)
        places.append(place_at(op, moved, sizes[axis]))
    # Each offset group of each image is treated as an image, whose pixels start at row `begin`.
    images = op.Mul(op.dim(n.X, 0), grid[1])
    begin = op.Mul(op.Range(0, op.Reshape(images, []), 1), product(op, sizes))
    begin = _reshaped(op, begin, [*grid[:2], *[[1]] * (1 + spatial)])
    pixels = _reshaped(op, n.X, [images, [channels], *sizes])
    rows = op.Transpose(pixels, perm=[0, *range(2, 2 + spatial), 1])
    rows = _reshaped(op, rows, [product(op, [images, *sizes]), [channels]])
    s = _Samples(places, [], [], [], rows)
    for corner in corners(places):
        index, inside = pixel(op, places, corner, zeros=True)
        assert inside is not None
        factor = product(op, [*weights(op, places, corner), inside])
        assert factor is not None
        s.indices.append(op.Add(index, begin))
        s.inside.append(inside)
        s.factors.append(factor)
    return s


def _image_cotangent(op: Emitter, n: NodeView, s: _Samples, ct: ir.Value, channels: int) -> ir.Value:
    """Returns the cotangent of X: scatters the samples' cotangents, channels last, to the pixels that were read."""
    updates = op.Concat(*(op.Mul(ct, op.Unsqueeze(factor, [-1])) for factor in s.factors), axis=0)
    where = op.Unsqueeze(op.Concat(*s.indices, axis=0), [-1])
    total = scatter_nd(op, op.Shape(s.rows), where, updates)
    sizes = [op.dim(n.X, 2 + axis) for axis in range(len(s.places))]
    # From one image per offset group back to the channels of X.
    images = op.Mul(op.dim(n.X, 0), [n.attr("offset_group")])
    pixels = _reshaped(op, total, [images, *sizes, [channels]])
    return op.reshape_like(op.Transpose(pixels, perm=[0, len(sizes) + 1, *range(1, len(sizes) + 1)]), n.X)


def _offset_cotangent(
    op: Emitter, n: NodeView, s: _Samples, ct: ir.Value, reads: Sequence[ir.Value]
) -> ir.Value:
    """Returns the cotangent of `offset`: the corner weights' cotangents times the weights' slopes along each axis.

    Args:
        op: emitter.
        n: the node.
        s: the samples.
        ct: cotangents of the samples, channels last.
        reads: for each corner, the pixels that the samples read, channels last.
    """
    values = [
        op.Mul(op.ReduceSum(op.Mul(ct, read), [-1], keepdims=0), inside)
        for read, inside in zip(reads, s.inside, strict=True)
    ]
    along = [op.Unsqueeze(slope, [3]) for slope in slopes(op, s.places, values)]
    return op.reshape_like(op.Concat(*along, axis=3), n.offset)


def _reshaped(op: Emitter, value: ir.Value, sizes: _Sizes) -> ir.Value:
    """Reshapes a value; each size is an int64 [1], constant or computed at run time."""
    return op.Reshape(value, op.Concat(*sizes, axis=0), allowzero=1)
