"""Defines reversible instance normalization, with one op forward and one backward (Kim et al., ICLR 2022).

The gradient treats mean and stdev of each series as constants, so it is the gradient of an affine map of x.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import AttributeRef, Emitter

from ._composite import composite

_AXES = {"axes": ir.AttributeType.INTS}
_SUMS = {"axes": ir.AttributeType.INTS, "rows": ir.AttributeType.INTS}


@composite("InstanceStandardization", ["x", "epsilon"], _AXES, outputs=3)
def instance_standardization(
    op: Emitter, x: ir.Value, epsilon: ir.Value, axes: AttributeRef
) -> tuple[ir.Value, ...]:
    """Standardizes x over `axes`: y = (x - mean) / stdev, with stdev = sqrt(variance + epsilon).

    Returns y, mean and stdev. x: `[batch, ..., n]`; epsilon: scalar; mean and stdev have size 1 along `axes`.
    """
    centered, mean, stdev = _center(op, x, epsilon, axes)
    return op.Div(centered, stdev), mean, stdev


@composite("ReversibleInstanceNormalization", ["x", "weight", "bias", "epsilon"], _AXES, outputs=4)
def reversible_instance_normalization(
    op: Emitter, x: ir.Value, weight: ir.Value, bias: ir.Value, epsilon: ir.Value, axes: AttributeRef
) -> tuple[ir.Value, ...]:
    """Normalizes x over `axes`: y = (x - mean) * (weight / stdev) + bias, with stdev = sqrt(variance + epsilon).

    Returns y, mean and stdev, and x - mean for the backward pass. x: `[batch, ..., n]`; weight and bias: `[n]`;
    epsilon: scalar; mean and stdev have size 1 along `axes`.
    """
    centered, mean, stdev = _center(op, x, epsilon, axes)
    return op.Add(op.Mul(centered, op.Div(weight, stdev)), bias), mean, stdev, centered


@composite("ReversibleInstanceNormalizationGradient", ["ct", "centered", "weight", "stdev"], _SUMS, outputs=3)
def reversible_instance_normalization_gradient(
    op: Emitter,
    ct: ir.Value,
    centered: ir.Value,
    weight: ir.Value,
    stdev: ir.Value,
    axes: AttributeRef,
    rows: AttributeRef,
) -> tuple[ir.Value, ...]:
    """VJP of ReversibleInstanceNormalization: cotangents of x, weight and bias.

    `rows`: all axes except the last one; `axes`: the subset along which stdev has size 1.
    """
    # weight / stdev has one entry per series and feature, so Mul is the only op on a tensor of the size of x.
    return op.Mul(ct, op.Div(weight, stdev)), *_parameter_cotangents(op, ct, centered, stdev, axes, rows)


@composite("ReversibleInstanceNormalizationParameterGradient", ["ct", "centered", "stdev"], _SUMS, outputs=2)
def reversible_instance_normalization_parameter_gradient(
    op: Emitter, ct: ir.Value, centered: ir.Value, stdev: ir.Value, axes: AttributeRef, rows: AttributeRef
) -> tuple[ir.Value, ...]:
    """VJP of ReversibleInstanceNormalization with respect to weight and bias only."""
    return _parameter_cotangents(op, ct, centered, stdev, axes, rows)


def _center(
    op: Emitter, x: ir.Value, epsilon: ir.Value, axes: AttributeRef
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Emits x - mean, mean, and stdev = sqrt(variance + epsilon), all over `axes`; gradients stop at mean and stdev."""
    # The stops also keep second derivatives, taken of the inlined body, from flowing through the statistics.
    over = op.ints(axes)
    mean = op.stop_gradient(op.ReduceMean(x, over, keepdims=1))
    centered = op.Sub(x, mean)
    variance = op.ReduceMean(op.Mul(centered, centered), over, keepdims=1)
    return centered, mean, op.stop_gradient(op.Sqrt(op.Add(variance, epsilon)))


def _parameter_cotangents(
    op: Emitter, ct: ir.Value, centered: ir.Value, stdev: ir.Value, axes: AttributeRef, rows: AttributeRef
) -> tuple[ir.Value, ir.Value]:
    """Returns the cotangents of weight and bias: the sums of ct * centered / stdev and of ct over `rows`.

    `rows`: all axes except the last one; `axes`: the subset of `rows` along which stdev has size 1.
    """
    over = op.ints(rows)
    # Summed over each series first: stdev has one entry per series, so the division is cheap.
    series = op.ReduceSum(op.Mul(ct, centered), op.ints(axes), keepdims=1)
    ct_weight = op.ReduceSum(op.Div(series, stdev), over, keepdims=0)
    return ct_weight, op.ReduceSum(ct, over, keepdims=0)
