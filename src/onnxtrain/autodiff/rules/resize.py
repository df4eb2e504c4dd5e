"""Differentiates ops that change the resolution of images or rearrange positions."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import defvjp, vjp
from onnxtrain.autodiff.rules._count import counting_dtype
from onnxtrain.autodiff.rules._scatter import scatter_nd
from onnxtrain.autodiff.rules._windows import Windows, pad, tap_slices
from onnxtrain.autodiff.rules.contrib._shared import unsupported
from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.errors import ShapeRequired

# The inverse of SpaceToDepth is DepthToSpace in its default mode.
defvjp("SpaceToDepth", input=lambda op, n, ct: op.DepthToSpace(ct, blocksize=n.attr("blocksize")))


@vjp("DepthToSpace", wrt=("input",))
def depth_to_space(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of DepthToSpace: applies the inverse permutation to ct."""
    block = n.attr("blocksize")
    if n.attr("mode") == "DCR":
        return op.SpaceToDepth(ct, blocksize=block)
    # SpaceToDepth lacks this mode, so a Transpose moves the elements. In mode CRD, channel c * block² + i * block + j
    # went to row offset i and column offset j of channel c.
    channels, height, width = (op.dim(ct, 1), op.dim(n.input, 2), op.dim(n.input, 3))
    shape = op.Concat(op.dim(ct, 0), channels, height, [block], width, [block], axis=0)
    blocks = op.Reshape(ct, shape, allowzero=1)
    return op.reshape_like(op.Transpose(blocks, perm=[0, 1, 3, 5, 2, 4]), n.input)


@vjp("Col2Im", wrt=("input",))
def col2im(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of Col2Im, which adds blocks into an image: each block reads its part of ct."""
    kernel = n.constant(n.block_shape)
    if kernel is None:
        raise ShapeRequired(
            f"differentiating Col2Im (node {n.node.name!r}): block_shape is computed at run time; make it "
            "a constant"
        )
    rank = len(kernel)
    pads = tuple(n.attr("pads") or [0] * 2 * rank)
    w = Windows(
        tuple(int(k) for k in kernel),
        tuple(n.attr("strides") or [1] * rank),
        tuple(n.attr("dilations") or [1] * rank),
        pads[:rank],
        pads[rank:],
    )
    taps = [op.Unsqueeze(op.merge_from(x, 2), [2]) for x in tap_slices(op, pad(op, ct, w), w)]
    return op.reshape_like(op.Concat(*taps, axis=2), n.input)


@vjp("Resize", wrt=("X",))
def resize(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of Resize, Y = X times a matrix along each resized axis: multiplies ct by the transposed matrices.

    The matrix of an axis is computed by resizing an identity matrix with the node's attributes, so it is correct for
    every mode and for symbolic sizes. It is dense: an axis of length n costs n², and up to n³ with
    keep_aspect_ratio_policy. Without antialiasing, each position reads 1 (nearest), 2 (linear) or 4 (cubic) neighbors,
    so for a long axis, ct is scattered to these neighbors instead.
    """
    if n.scales is None and n.sizes is None:
        raise unsupported(n, "inputs without scales or sizes")
    rank = n.rank(n.X)
    axes = [n.axis(n.X, axis) for axis in n.attr("axes") or range(rank)]
    factors = _repetitions(n, axes)
    # Every pixel was repeated: the sum over its copies is their mean times their number.
    if factors is not None:
        mean = op.AveragePool(ct, kernel_shape=factors, strides=factors)
        return op.Mul(mean, float(np.prod(factors)))
    for position in reversed(range(len(axes))):
        if _is_unchanged(n, axes, position):
            continue
        if _is_long(n, axes[position]):
            ct = _scatter_along(op, n, axes, position, ct)
        else:
            ct = _multiply_along(op, ct, _matrix(op, n, axes, position, ct), axes[position], rank)
    return ct


_LARGEST_MATRIX = 1 << 18
"""Up to this many elements of the matrix, a product with it is faster than scattering; the matrix takes up to 1 MB."""

_NEIGHBORS = {"nearest": 1, "linear": 2, "cubic": 4}
"""Number of positions that one position of the result reads along an axis, without antialiasing."""


def _is_long(n: NodeView, axis: int) -> bool:
    """True if an axis is so long that `_scatter_along` is faster than a product with the axis's resize matrix.

    An axis of unknown size is treated as long only if X has rank 3, i.e. consists of sequences. Always False with
    antialiasing, with keep_aspect_ratio_policy, or if the rank of Y is unknown.
    """
    if n.attr("antialias") or _keeps_aspect_ratio(n) or n.out.Y.shape is None:
        return False
    sizes = (static_dims(n.X) or ())[axis], (static_dims(n.out.Y) or ())[axis]
    if None in sizes:
        return n.rank(n.X) == 3
    return int(sizes[0] or 0) * int(sizes[1] or 0) > _LARGEST_MATRIX


def _scatter_along(op: Emitter, n: NodeView, axes: Sequence[int], position: int, ct: ir.Value) -> ir.Value:
    """Multiplies `ct` by the transposed resize matrix of the axis `axes[position]`, without computing the matrix.

    Each position of Y is a weighted sum of a few neighboring positions of X. Resizing the numbers 0, 1, 2, ..., i.e.
    the positions of X, yields approximately where each position of Y reads X. Resizing m masks, each of which marks
    every m-th position of X, yields the weights. m is at least twice the number of neighbors, so each position of Y
    reads at most one of the positions that a mask marks: the nearest one.
    """
    axis, rank, dtype = axes[position], n.rank(n.X), counting_dtype(ct)
    count = _NEIGHBORS[n.attr("mode")]
    classes = 2 * count if count > 1 else 4
    size = op.dim(n.X, axis)
    places = op.Range(0, op.Squeeze(size, [0]), 1)
    numbers = op.Unsqueeze(op.const(np.arange(classes)), [1])
    masks = op.Cast(op.Equal(op.Mod(places, op.const(classes)), numbers), to=dtype)
    probes = op.Concat(op.Unsqueeze(op.Cast(places, to=dtype), [0]), masks, axis=0)
    resized = _resized_rows(op, n, axes, position, probes)
    about, weights = op.Split(resized, op.const([1, classes]), axis=0, _outputs=2)
    # The neighbors are the positions with the largest weights; others have weight 0.
    _, chosen = op.TopK(op.Abs(weights), op.const([count]), axis=0, _outputs=2)
    weights = op.GatherElements(weights, chosen, axis=0)
    offset = op.Cast(chosen, to=dtype)
    steps = op.Round(op.Div(op.Sub(about, offset), float(classes)))
    index = op.Add(op.Cast(op.Mul(steps, float(classes)), to=ir.DataType.INT64), chosen)
    index = op.Reshape(op.Max(op.Min(index, op.Sub(size, 1)), 0), [-1])
    index.shape = ir.Shape([None])
    if dtype != ct.dtype:
        weights = op.CastLike(weights, ct)
    others = [k for k in range(rank) if k != axis]
    rows = op.Transpose(ct, perm=[axis, *others]) if axis else ct
    behind = list(range(2, rank + 1))
    weighted = op.Mul(op.Unsqueeze(rows, [0]), op.Unsqueeze(weights, behind) if behind else weights)
    # [neighbors, size of Y, ...] to [neighbors * size of Y, ...]
    shape = op.Concat(op.Shape(index), op.Shape(rows, start=1), axis=0)
    flat = op.Reshape(weighted, shape, allowzero=1)
    sizes = op.Concat(size, op.Shape(rows, start=1), axis=0)
    total = scatter_nd(op, sizes, op.Unsqueeze(index, [-1]), flat)
    back = [*range(1, axis + 1), 0, *range(axis + 1, rank)]
    return op.Transpose(total, perm=back) if axis else total


def _repetitions(n: NodeView, axes: Sequence[int]) -> list[int] | None:
    """Returns how often each spatial position is repeated, e.g. [2, 2], or None if the Resize does anything else.

    The VJP of such a Resize is a sum over blocks, which is far cheaper than matrix products.
    """
    where, rounding = n.attr("coordinate_transformation_mode"), n.attr("nearest_mode")
    # In these modes, position i at integer scale s reads pixel i // s.
    centered = where == "half_pixel" and rounding in ("round_prefer_floor", "round_prefer_ceil")
    if (
        _keeps_aspect_ratio(n)
        or n.attr("mode") != "nearest"
        or not (centered or (where, rounding) == ("asymmetric", "floor"))
    ):
        return None
    sizes, results = static_dims(n.X), static_dims(n.out.Y)
    # The rank of Y is unknown if the file declares a rank that differs from X's.
    if sizes is None or results is None:
        return None
    factors = [1.0] * len(sizes)
    scales = n.constant(n.scales)
    for position, axis in enumerate(axes):
        size, result = sizes[axis], results[axis]
        if _is_unchanged(n, axes, position):
            continue
        if scales is not None and n.sizes is None:
            factors[axis] = float(scales[position])
        elif size and result:
            factors[axis] = result / size
        else:
            return None
    if (
        len(factors) not in (3, 4, 5)
        or any(factor < 1 or factor % 1 for factor in factors)
        or factors[:2] != [1, 1]
    ):
        return None
    return [int(factor) for factor in factors[2:]]


def _is_unchanged(n: NodeView, axes: Sequence[int], position: int) -> bool:
    """True if the axis `axes[position]` is known not to be resized."""
    # A crop moves positions even at scale 1.
    if n.attr("coordinate_transformation_mode") == "tf_crop_and_resize":
        return False
    if n.sizes is None:
        scales = n.constant(n.scales)
        return scales is not None and bool(scales[position] == 1)
    if n.X.shape is None or n.out.Y.shape is None or _keeps_aspect_ratio(n):
        return False
    dim, result = n.X.shape[axes[position]], n.out.Y.shape[axes[position]]
    return bool(dim == result) and (isinstance(dim, int) or dim.value is not None)


def _keeps_aspect_ratio(n: NodeView) -> bool:
    """True if keep_aspect_ratio_policy applies: all axes have the same scale, for which `sizes` are only bounds."""
    return n.sizes is not None and n.attr("keep_aspect_ratio_policy") != "stretch"


def _matrix(op: Emitter, n: NodeView, axes: Sequence[int], position: int, like: ir.Value) -> ir.Value:
    """Returns the matrix `[size of X, size of Y]` that resizes one axis when X is multiplied by it.

    Args:
        op: emitter.
        n: the node.
        axes: the axes that the node resizes.
        position: index of the axis within `axes`.
        like: the cotangent, whose dtype the matrix gets.
    """
    dtype = counting_dtype(like)
    size = op.dim(n.X, axes[position])
    square = op.Concat(size, size, axis=0)
    identity = op.EyeLike(op.Expand(op.const(0, dtype), square))
    # Set here, because scattering along a later axis needs the dtype, which the op's schema does not determine.
    identity.type = ir.TensorType(dtype)
    matrix = _resized_rows(op, n, axes, position, identity)
    if like.dtype is None:
        return op.CastLike(matrix, like)
    return matrix if dtype == like.dtype else op.Cast(matrix, to=like.dtype)


def _resized_rows(op: Emitter, n: NodeView, axes: Sequence[int], position: int, rows: ir.Value) -> ir.Value:
    """Resizes rows `[count, size of X]` to `[count, size of Y]`, as the node resizes the axis `axes[position]`."""
    size = op.dim(n.X, axes[position])
    unit = op.const(np.ones(3, np.float32))
    here = op.const([position])
    resized_axes: dict[str, Any] = {}
    image = op.Unsqueeze(rows, [0, 1])
    roi = scales = sizes = None
    if n.attr("coordinate_transformation_mode") == "tf_crop_and_resize":
        begin, end = op.Gather(n.roi, here), op.Gather(n.roi, op.const([position + len(axes)]))
        zero = op.Mul(op.CastLike(unit, n.roi), 0.0)
        roi = op.Concat(zero, begin, op.CastLike(unit, n.roi), end, axis=0)
    if _keeps_aspect_ratio(n):
        # The common scale differs from the ratio of this axis's sizes. Add a second axis, along which the image is
        # constant, with the sizes that determine the scale.
        before, after = _common_scale(op, n, axes)
        image = op.Expand(op.Unsqueeze(rows, [1, 2]), op.Concat(size, [1], before, size, axis=0))
        sizes = op.Concat(after, op.Gather(n.sizes, here), axis=0)
        resized_axes = {"axes": [2, 3], "keep_aspect_ratio_policy": n.attr("keep_aspect_ratio_policy")}
        if roi is not None:
            roi = op.Concat(op.Slice(roi, [2], [4]), op.Slice(roi, [6], [8]), axis=0)
    elif n.sizes is None:
        scales = op.Concat(unit, op.Gather(n.scales, here), axis=0)
    else:
        sizes = op.Concat([1, 1], op.Shape(rows, start=0, end=1), op.Gather(n.sizes, here), axis=0)
    attributes = {
        name: n.attr(name)
        for name in (
            "antialias",
            "coordinate_transformation_mode",
            "cubic_coeff_a",
            "exclude_outside",
            "mode",
            "nearest_mode",
        )
    }
    resized = op.Resize(image, roi, scales, sizes, **attributes, **resized_axes)
    if resized_axes:
        return op.Squeeze(op.Slice(resized, [0], [1], [2]), [1, 2])
    return op.Squeeze(resized, [0, 1])


def _common_scale(op: Emitter, n: NodeView, axes: Sequence[int]) -> tuple[ir.Value, ir.Value]:
    """Returns two sizes, before and after resizing, int64 [1] each, whose ratio is the common scale of all axes."""
    smallest = n.attr("keep_aspect_ratio_policy") == "not_larger"
    bounds, dims = n.constant(n.sizes), static_dims(n.X) or ()
    input_sizes = [dims[axis] for axis in axes] if dims else [None]
    if bounds is not None and None not in input_sizes:
        # As fractions, so that rounding can't choose the wrong axis if two ratios are nearly equal.
        scales = [Fraction(int(size), int(dim or 1)) for size, dim in zip(bounds, input_sizes, strict=True)]
        scale = min(scales) if smallest else max(scales)
        return op.const([scale.denominator]), op.const([scale.numerator])
    sizes = op.Gather(op.Shape(n.X), op.const(axes))
    quotients = op.Div(*(op.Cast(value, to=ir.DataType.FLOAT) for value in (n.sizes, sizes)))
    place = op.ArgMin(quotients) if smallest else op.ArgMax(quotients)
    return op.Gather(sizes, place), op.Gather(n.sizes, place)


def _multiply_along(op: Emitter, ct: ir.Value, matrix: ir.Value, axis: int, rank: int) -> ir.Value:
    """Multiplies `ct`, of rank `rank`, by a matrix along one axis."""
    # MatMul contracts the last two axes; for an earlier axis, all axes after it are flattened.
    if axis == rank - 1:
        return op.MatMul(ct, op.Transpose(matrix, perm=[1, 0]))
    if axis == rank - 2:
        return op.MatMul(matrix, ct)
    after = op.Shape(ct, start=axis + 1)
    product = op.MatMul(matrix, op.merge_from(ct, axis + 1))
    kept = op.Shape(product, start=0, end=axis + 1)
    return op.Reshape(product, op.Concat(kept, after, axis=0), allowzero=1)
