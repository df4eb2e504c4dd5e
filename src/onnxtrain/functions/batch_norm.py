"""Defines training-mode BatchNormalization, alone and fused with subsequent ops, and MaxPool, for native kernels.

The gradient of BatchNormalization alone is in `normalization`.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.emitter import AttributeRef, Emitter

from ._composite import composite
from .normalization import batch_normalization_cotangents

_INPUTS = ["x", "scale", "bias", "mean", "var"]
_WINDOWS = dict.fromkeys(("kernel_shape", "strides", "pads"), ir.AttributeType.INTS)
_EPSILON = {"epsilon": ir.AttributeType.FLOAT}
_ATTRIBUTES = _EPSILON | {"momentum": ir.AttributeType.FLOAT}


@composite("BatchNormalizationTraining", _INPUTS, _ATTRIBUTES, outputs=3)
def batch_normalization_training(op: Emitter, *inputs: ir.Value, **attributes: Any) -> tuple[ir.Value, ...]:
    """Computes BatchNormalization with batch statistics; returns the output and the updated running statistics.

    The inputs are x, `[batch, channels, *spatial]`, and scale, bias, running mean and running variance, `[channels]`.
    """
    return op.BatchNormalization(*inputs, training_mode=1, **attributes, _outputs=3)


@composite("BatchNormalizationRelu", _INPUTS, _ATTRIBUTES, outputs=3)
def batch_normalization_relu(op: Emitter, *inputs: ir.Value, **attributes: Any) -> tuple[ir.Value, ...]:
    """Computes BatchNormalizationTraining, with Relu applied to the output."""
    # Kernels compute both in one pass, while a channel of all samples is in the cache.
    y, mean, var = op.BatchNormalization(*inputs, training_mode=1, **attributes, _outputs=3)
    return op.Relu(y), mean, var


@composite("BatchNormalizationReluGradient", ["ct", "x", "scale", "y"], _EPSILON, outputs=3)
def batch_normalization_relu_gradient(
    op: Emitter, ct: ir.Value, x: ir.Value, scale: ir.Value, y: ir.Value, *, epsilon: AttributeRef
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """VJP of BatchNormalizationRelu: cotangents of x, scale and bias. y is the forward output; ct must be finite."""
    return batch_normalization_cotangents(op, _relu_cotangent(op, y, ct), x, scale, epsilon)


@composite("BatchNormalizationRelu6", _INPUTS, _ATTRIBUTES, outputs=3)
def batch_normalization_relu6(op: Emitter, *inputs: ir.Value, **attributes: Any) -> tuple[ir.Value, ...]:
    """Computes BatchNormalizationTraining, with the output clipped to [0, 6]."""
    y, mean, var = op.BatchNormalization(*inputs, training_mode=1, **attributes, _outputs=3)
    return op.Clip(y, 0.0, 6.0), mean, var


@composite("BatchNormalizationRelu6Gradient", ["ct", "x", "scale", "y"], _EPSILON, outputs=3)
def batch_normalization_relu6_gradient(
    op: Emitter, ct: ir.Value, x: ir.Value, scale: ir.Value, y: ir.Value, *, epsilon: AttributeRef
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """VJP of BatchNormalizationRelu6: cotangents of x, scale and bias. y is the forward output; ct must be finite."""
    # As in PyTorch, ReLU6's gradient on its bounds is 0.
    beyond = op.Or(op.LessOrEqual(y, 0.0), op.GreaterOrEqual(y, 6.0))
    within = op.Mul(ct, op.Cast(op.Not(beyond), to=ct.dtype))
    return batch_normalization_cotangents(op, within, x, scale, epsilon)


@composite("BatchNormalizationMaxPoolRelu", _INPUTS, _ATTRIBUTES | _WINDOWS, outputs=4)
def batch_normalization_max_pool_relu(
    op: Emitter,
    *inputs: ir.Value,
    kernel_shape: AttributeRef,
    strides: AttributeRef,
    pads: AttributeRef,
    **attributes: Any,
) -> tuple[ir.Value, ...]:
    """Computes Relu(MaxPool(BatchNormalizationTraining)); the last output contains MaxPool's indices, int64."""
    y, mean, var = op.BatchNormalization(*inputs, training_mode=1, **attributes, _outputs=3)
    windows = {"kernel_shape": kernel_shape, "strides": strides, "pads": pads}
    pooled, indices = op.MaxPool(y, **windows, _outputs=2)
    return op.Relu(pooled), mean, var, indices


@composite(
    "BatchNormalizationMaxPoolReluGradient",
    ["ct", "x", "scale", "y", "indices"],
    _EPSILON,
    outputs=3,
    dtypes={"indices": ir.DataType.INT64},
)
def batch_normalization_max_pool_relu_gradient(
    op: Emitter,
    ct: ir.Value,
    x: ir.Value,
    scale: ir.Value,
    y: ir.Value,
    indices: ir.Value,
    *,
    epsilon: AttributeRef,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """VJP of BatchNormalizationMaxPoolRelu: cotangents of x, scale and bias.

    x: `[batch, channels, *spatial]`; y: the forward output; indices: flat positions of the maxima in x, all distinct;
    ct must be finite.
    """
    # MaxUnpool with windows of size 1 writes each cotangent to its index, and zeros elsewhere. Reshaped to a single
    # row, so that the body works for any number of spatial axes.
    positive, indices = (op.Reshape(value, [1, 1, -1]) for value in (_relu_cotangent(op, y, ct), indices))
    size = op.Concat([1, 1], op.Reshape(op.Size(x), [1]), axis=0)
    spread = op.MaxUnpool(positive, indices, size, kernel_shape=[1], strides=[1])
    return batch_normalization_cotangents(op, op.Reshape(spread, op.Shape(x)), x, scale, epsilon)


@composite("MaxPool", ["x"], _WINDOWS, outputs=2)
def max_pool(op: Emitter, x: ir.Value, **windows: AttributeRef) -> tuple[ir.Value, ...]:
    """Computes MaxPool and the indices of the maxima, int64. x: `[batch, channels, *spatial]`."""
    return op.MaxPool(x, **windows, _outputs=2)


def _relu_cotangent(op: Emitter, y: ir.Value, ct: ir.Value) -> ir.Value:
    """Returns the cotangent of Relu's input, given the output y and a finite ct: 0 where y <= 0, else ct."""
    return op.Mul(ct, op.Cast(op.Not(op.LessOrEqual(y, 0.0)), to=ct.dtype))
