"""Training BatchNormalization, alone and with what follows it, and MaxPool, as functions that have native kernels.

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
_ATTRIBUTES = {"epsilon": ir.AttributeType.FLOAT, "momentum": ir.AttributeType.FLOAT}


@composite("BatchNormalizationTraining", _INPUTS, _ATTRIBUTES, outputs=3)
def batch_normalization_training(op: Emitter, *inputs: ir.Value, **attributes: Any) -> tuple[ir.Value, ...]:
    """BatchNormalization by the statistics of the batch: the result and the updated running statistics.

    x: `[batch, channels, *spatial]`; the others: `[channels]`.
    """
    return op.BatchNormalization(*inputs, training_mode=1, **attributes, _outputs=3)


@composite("BatchNormalizationRelu", _INPUTS, _ATTRIBUTES, outputs=3)
def batch_normalization_relu(op: Emitter, *inputs: ir.Value, **attributes: Any) -> tuple[ir.Value, ...]:
    """Relu of BatchNormalizationTraining."""
    y, mean, var = op.BatchNormalization(*inputs, training_mode=1, **attributes, _outputs=3)
    return op.Relu(y), mean, var


@composite(
    "BatchNormalizationReluGradient",
    ["ct", "x", "scale", "y"],
    {"epsilon": ir.AttributeType.FLOAT},
    outputs=3,
)
def batch_normalization_relu_gradient(
    op: Emitter, ct: ir.Value, x: ir.Value, scale: ir.Value, y: ir.Value, *, epsilon: AttributeRef
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """BatchNormalizationRelu: cotangents of x, scale and bias; y is its result, of the shape of x; ct is finite."""
    return batch_normalization_cotangents(op, _where_positive(op, y, ct), x, scale, epsilon)


@composite("BatchNormalizationRelu6", _INPUTS, _ATTRIBUTES, outputs=3)
def batch_normalization_relu6(op: Emitter, *inputs: ir.Value, **attributes: Any) -> tuple[ir.Value, ...]:
    """BatchNormalizationTraining, limited to [0, 6]."""
    y, mean, var = op.BatchNormalization(*inputs, training_mode=1, **attributes, _outputs=3)
    return op.Clip(y, 0.0, 6.0), mean, var


@composite(
    "BatchNormalizationRelu6Gradient",
    ["ct", "x", "scale", "y"],
    {"epsilon": ir.AttributeType.FLOAT},
    outputs=3,
)
def batch_normalization_relu6_gradient(
    op: Emitter, ct: ir.Value, x: ir.Value, scale: ir.Value, y: ir.Value, *, epsilon: AttributeRef
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """BatchNormalizationRelu6: as of BatchNormalizationRelu; ReLU6's gradient is 0 at its bounds, as in PyTorch."""
    within = op.Mul(_where_positive(op, y, ct), op.Cast(op.Less(y, 6.0), to=ct.dtype))
    return batch_normalization_cotangents(op, within, x, scale, epsilon)


@composite(
    "BatchNormalizationMaxPoolRelu",
    _INPUTS,
    _ATTRIBUTES | _WINDOWS,
    outputs=4,
)
def batch_normalization_max_pool_relu(
    op: Emitter,
    *inputs: ir.Value,
    kernel_shape: AttributeRef,
    strides: AttributeRef,
    pads: AttributeRef,
    **attributes: Any,
) -> tuple[ir.Value, ...]:
    """Relu of MaxPool of BatchNormalizationTraining; the last output is MaxPool's indices, int64."""
    y, mean, var = op.BatchNormalization(*inputs, training_mode=1, **attributes, _outputs=3)
    windows = {"kernel_shape": kernel_shape, "strides": strides, "pads": pads}
    pooled, indices = op.MaxPool(y, **windows, _outputs=2)
    return op.Relu(pooled), mean, var, indices


@composite(
    "BatchNormalizationMaxPoolReluGradient",
    ["ct", "x", "scale", "y", "indices"],
    {"epsilon": ir.AttributeType.FLOAT},
    outputs=3,
    integers=["indices"],
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
    """BatchNormalizationMaxPoolRelu: cotangents of x, scale and bias.

    x: `[batch, channels, height, width]`; y: the result; indices: of the maxima in x as one vector, no two the same;
    ct is finite.
    """
    positive = _where_positive(op, y, ct)
    spread = op.MaxUnpool(positive, indices, op.Shape(x), kernel_shape=[1, 1], strides=[1, 1])
    return batch_normalization_cotangents(op, spread, x, scale, epsilon)


@composite("MaxPool", ["x"], _WINDOWS, outputs=2)
def max_pool(op: Emitter, x: ir.Value, **windows: AttributeRef) -> tuple[ir.Value, ...]:
    """MaxPool and the indices of the maxima, int64. x: `[batch, channels, height, width]`."""
    return op.MaxPool(x, **windows, _outputs=2)


def _where_positive(op: Emitter, y: ir.Value, ct: ir.Value) -> ir.Value:
    """Returns the cotangent of Relu's argument; see `ReluGradientOfFinite`."""
    return op.Mul(ct, op.Cast(op.Not(op.LessOrEqual(y, 0.0)), to=ct.dtype))
