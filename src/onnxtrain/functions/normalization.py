"""Defines GroupNormalization, and gradients of normalizations.

The gradients of onnxtrain's own root mean square ops are in `rms_norm`.

The gradients in this module use one formula. Let x̂ = (x - mean(x)) * r with r = 1 / sqrt(var(x) + epsilon) over some
axes, and let g be the cotangent of x̂. The cotangent of x is r * (g - mean(g) - x̂ * mean(g * x̂)), with means over the
same axes (Ioffe and Szegedy, "Batch Normalization", 2015; Ba, Kiros and Hinton, "Layer Normalization", 2016).
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.emitter import AttributeRef, Emitter

from ._composite import composite

_EPSILON = {"epsilon": ir.AttributeType.FLOAT}


def _center(
    op: Emitter, x: ir.Value, axes: Sequence[int], epsilon: AttributeRef
) -> tuple[ir.Value, ir.Value]:
    """Emits x - mean(x) and r = 1 / sqrt(var(x) + epsilon), with mean and variance over `axes`."""
    centered = op.Sub(x, op.ReduceMean(x, list(axes), keepdims=1))
    variance = op.ReduceMean(op.Mul(centered, centered), list(axes), keepdims=1)
    return centered, op.Reciprocal(op.Sqrt(op.Add(variance, op.number(epsilon, x))))


@composite("BatchNormalizationGradient", ["ct", "x", "scale"], _EPSILON, outputs=3)
def batch_normalization_gradient(
    op: Emitter, ct: ir.Value, x: ir.Value, scale: ir.Value, *, epsilon: AttributeRef
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """VJP of training BatchNormalization: cotangents of x, scale and bias.

    ct, x: `[batch, channels, *spatial]`; scale: `[channels]`.
    """
    return batch_normalization_cotangents(op, ct, x, scale, epsilon)


def batch_normalization_cotangents(
    op: Emitter, ct: ir.Value, x: ir.Value, scale: ir.Value, epsilon: AttributeRef
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Emits the cotangents of x, scale and bias, for statistics of x over the batch and spatial axes.

    ct, x: `[batch, channels, *spatial]`; scale: `[channels]`.
    """
    flat, ones = op.merge_from(x, 2), _ones_of_batch(op, x)
    cts = op.Reshape(ct, op.Shape(flat), allowzero=1)
    # 1 / n for the n elements of a channel, computed at run time, because the function serves any shape.
    share = op.Reciprocal(op.Cast(op.Div(op.Size(x), op.Size(scale)), to=ct.dtype))
    # x̂ = r * (x - mean(x)) is never materialized, which saves a pass over memory: its factor r is applied to the
    # per-channel values.
    centered = op.Sub(flat, op.Mul(_channel_sums(op, flat, ones), share))
    variance = op.Mul(_channel_sums(op, op.Mul(centered, centered), ones), share)
    inverse = op.Reciprocal(op.Sqrt(op.Add(variance, op.number(epsilon, x))))
    ct_bias = _channel_sums(op, cts, ones)
    ct_scale = op.Mul(_channel_sums(op, op.Mul(cts, centered), ones), inverse)
    along = op.Mul(op.Mul(ct_scale, share), inverse)
    free = op.Sub(op.Sub(cts, op.Mul(centered, along)), op.Mul(ct_bias, share))
    ct_x = op.Mul(free, op.Mul(inverse, op.Unsqueeze(scale, [1])))
    return (op.reshape_like(ct_x, x), op.Reshape(ct_scale, [-1]), op.Reshape(ct_bias, [-1]))


def _ones_of_batch(op: Emitter, x: ir.Value) -> ir.Value:
    """Returns a row of ones with one entry per sample of x, `[1, batch]`."""
    return op.Expand(op.const(1.0, like=x), op.Concat([1], op.Shape(x, start=0, end=1), axis=0))


def _channel_sums(op: Emitter, x: ir.Value, ones: ir.Value) -> ir.Value:
    """Sums x, `[batch, channels, positions]`, to `[channels, 1]`."""
    # ONNX Runtime's ReduceSum over both axes takes up to 47 times as long for a batch of vectors ([8192, 64]), and a
    # fifth longer for images.
    sums = op.Reshape(op.MatMul(ones, op.Flatten(x, axis=1)), op.Shape(x, start=1), allowzero=1)
    return op.ReduceSum(sums, [1], keepdims=1)


@composite("GroupNormalization", ["x", "scale", "bias"], _EPSILON | {"num_groups": ir.AttributeType.INT})
def group_normalization(
    op: Emitter,
    x: ir.Value,
    scale: ir.Value,
    bias: ir.Value,
    *,
    epsilon: AttributeRef,
    num_groups: AttributeRef,
) -> ir.Value:
    """Computes x̂ * scale + bias, where x̂ is standardized over each channel group of each sample.

    x: `[batch, channels, *spatial]`; scale and bias: `[channels]`.
    """
    flat = op.merge_from(x, 2)
    # [batch, groups, elements]: a reduction over the last axis standardizes each group.
    count = op.Unsqueeze(op.ints(num_groups), [0])
    groups = op.Reshape(x, _shape_in_groups(op, x, count), allowzero=1)
    centered, inverse = _center(op, groups, [2], epsilon)
    # x̂ = r * (x - mean(x)) is never materialized, which saves a pass over memory.
    factor = _times_channels(op, inverse, scale, count, x)
    scaled = op.Mul(op.reshape_like(centered, flat), factor)
    return op.reshape_like(op.Add(scaled, op.Unsqueeze(bias, [1])), x)


def _times_channels(
    op: Emitter, value: ir.Value, channels: ir.Value, count: ir.Value, x: ir.Value
) -> ir.Value:
    """Multiplies a value per group, `[batch, groups, 1]`, by one per channel, `[channels]`: `[batch, channels, 1]`.

    count: number of groups, int64 [1].
    """
    product = op.Mul(value, op.Reshape(channels, op.Concat(count, [-1], axis=0)))
    return op.Reshape(product, op.Concat(op.Shape(x, start=0, end=2), [1], axis=0), allowzero=1)


def _shape_in_groups(op: Emitter, x: ir.Value, count: ir.Value) -> ir.Value:
    """Returns the shape `[batch, groups, group size]` for x, int64, given the number of groups, int64 [1]."""
    size = op.Div(op.Shape(op.Flatten(x, axis=1), start=1), count)
    return op.Concat(op.Shape(x, start=0, end=1), count, size, axis=0)


@composite(
    "GroupNormalizationGradient",
    ["ct", "x", "scale"],
    _EPSILON | {"num_groups": ir.AttributeType.INT},
    outputs=3,
)
def group_normalization_gradient(
    op: Emitter,
    ct: ir.Value,
    x: ir.Value,
    scale: ir.Value,
    *,
    epsilon: AttributeRef,
    num_groups: AttributeRef,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """VJP of GroupNormalization: cotangents of x, scale and bias.

    ct, x: `[batch, channels, *spatial]`; scale: `[channels]`. With `num_groups` 0, every channel is a group, as in
    InstanceNormalization.
    """
    flat = op.merge_from(ct, 2)
    groups_given = op.Unsqueeze(op.ints(num_groups), [0])
    count = op.Where(op.Equal(groups_given, op.const([0])), op.Shape(scale), groups_given)
    groups = _shape_in_groups(op, x, count)
    centered, inverse = _center(op, op.Reshape(x, groups, allowzero=1), [2], epsilon)
    # Everything but four elementwise ops is computed from sums over the positions of each channel.
    sums = op.ReduceSum(flat, [2], keepdims=1)
    sums_along = op.ReduceSum(op.Mul(flat, op.reshape_like(centered, flat)), [2], keepdims=1)
    share = op.Reciprocal(op.Cast(op.Slice(groups, [2], [3]), to=ct.dtype))
    in_groups = op.Concat(op.Slice(groups, [0], [2]), op.Div(op.Shape(scale), count), axis=0)

    def mean(of_channels: ir.Value) -> ir.Value:
        """Returns the mean over each group, given sums over the positions of each channel; with factor r."""
        scaled = op.Reshape(op.Mul(of_channels, op.Unsqueeze(scale, [1])), in_groups, allowzero=1)
        return op.Mul(op.Mul(op.ReduceSum(scaled, [2], keepdims=1), inverse), share)

    # One factor r at a time: r³ alone may overflow.
    along = op.Mul(op.Mul(mean(sums_along), inverse), inverse)
    scaled = op.Mul(flat, _times_channels(op, inverse, scale, count, x))
    free = op.Sub(op.Reshape(scaled, groups, allowzero=1), op.Mul(centered, along))
    ct_x = op.Sub(free, mean(sums))
    ones = op.Expand(op.const(1.0, like=ct), op.Shape(scale))
    ct_scale = op.ReduceSum(
        op.Mul(sums_along, _times_channels(op, inverse, ones, count, x)), [0, 2], keepdims=0
    )
    return op.reshape_like(ct_x, x), ct_scale, op.ReduceSum(sums, [0, 2], keepdims=0)


@composite(
    "LayerNormalizationTraining",
    ["x", "scale", "bias"],
    {"axis": ir.AttributeType.INT, "epsilon": ir.AttributeType.FLOAT},
    outputs=3,
)
def layer_normalization_training(
    op: Emitter, x: ir.Value, scale: ir.Value, bias: ir.Value, **attributes: AttributeRef
) -> tuple[ir.Value, ...]:
    """Computes LayerNormalization, and returns the mean and inverse standard deviation as well.

    scale and bias have the shape x.shape[axis:].
    """
    return op.LayerNormalization(x, scale, bias, **attributes, _outputs=3)


@composite("LayerNormalizationGradient", ["ct", "x", "scale", "mean", "inv_std_dev"], outputs=3)
def layer_normalization_gradient(
    op: Emitter, ct: ir.Value, x: ir.Value, scale: ir.Value, mean: ir.Value, inv_std_dev: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """VJP of LayerNormalization: cotangents of x, scale and bias.

    ct and x have the same shape; scale has the shape of the normalized axes, which are the last ones. mean and
    inv_std_dev are outputs of the forward node, with size 1 along the normalized axes.
    """
    size = op.Unsqueeze(op.Size(scale), [0])
    # As a matrix [positions, normalized elements], for any number of axes.
    matrix = op.Concat([-1], size, axis=0)
    rows, inverse = op.Reshape(ct, matrix), op.Reshape(inv_std_dev, [-1, 1])
    centered = op.Sub(op.Reshape(x, matrix), op.Reshape(mean, [-1, 1]))
    product = op.Mul(rows, centered)
    # Sums over rows and columns are computed as matrix products: Mul and ReduceSum would write and read the product
    # once more.
    share = op.Reciprocal(op.Cast(size, to=ct.dtype))
    weights = op.Mul(op.Reshape(scale, [-1, 1]), share)
    along = op.Mul(op.Mul(op.MatMul(product, weights), inverse), inverse)
    free = op.Sub(
        op.Sub(op.Mul(rows, op.Reshape(scale, [-1])), op.Mul(centered, along)), op.MatMul(rows, weights)
    )
    across = op.Reshape(inverse, [1, -1])
    ones = op.Expand(op.const(1.0, like=ct), op.Shape(across))
    shape = op.Shape(scale)
    return (
        # The Mul comes last, with the shape of x: a final Reshape would copy if its output is a graph output.
        op.Mul(op.reshape_like(free, x), inv_std_dev),
        op.Reshape(op.MatMul(across, product), shape),
        op.Reshape(op.MatMul(ones, rows), shape),
    )


@composite("RMSNormalizationGradient", ["ct", "x", "scale"], _EPSILON, outputs=2)
def rms_normalization_gradient(
    op: Emitter, ct: ir.Value, x: ir.Value, scale: ir.Value, *, epsilon: AttributeRef
) -> tuple[ir.Value, ir.Value]:
    """VJP of RMSNormalization: cotangents of x and scale.

    ct and x have the same shape; scale has the shape of the normalized axes, which are the last ones. With y = x * r, r
    = 1 / sqrt(mean(x²) + epsilon), and g = ct * scale: ct_x = r * (g - y * mean(g * y)).
    """
    matrix = op.Concat([-1], op.Unsqueeze(op.Size(scale), [0]), axis=0)
    rows, values = op.Reshape(ct, matrix), op.Reshape(x, matrix)
    # Recomputed from x, because ONNX's RMSNormalization doesn't return the root mean square.
    square = op.ReduceMean(op.Mul(values, values), [1], keepdims=1)
    inverse = op.Reciprocal(op.Sqrt(op.Add(square, op.number(epsilon, x))))
    standard = op.Mul(values, inverse)
    g = op.Mul(rows, op.Reshape(scale, [-1]))
    along = op.ReduceMean(op.Mul(g, standard), [1], keepdims=1)
    ct_x = op.Mul(op.Sub(g, op.Mul(standard, along)), inverse)
    ct_scale = op.ReduceSum(op.Mul(rows, standard), [0], keepdims=0)
    return op.reshape_like(ct_x, x), op.reshape_like(ct_scale, scale)
