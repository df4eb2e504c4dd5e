"""Training BatchNormalization, alone and with the ReLU behind it, as functions that native kernels take the place of.

The gradient of BatchNormalization alone is in `normalization`.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.emitter import AttributeRef, Emitter

from ._composite import composite
from .normalization import batch_normalization_cotangents

__all__ = ["batch_normalization_relu", "batch_normalization_relu_gradient", "batch_normalization_training"]

_INPUTS = ["x", "scale", "bias", "mean", "var"]
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
    masked = op.Mul(ct, op.Cast(op.Greater(y, 0.0), to=ct.dtype))
    return batch_normalization_cotangents(op, masked, x, scale, epsilon)
