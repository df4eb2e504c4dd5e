"""Reversible instance normalisation as one op forward and one backward (Kim et al., ICLR 2022).

Mean and stdev of each series are constants to the gradient, which is that of an affine map of x. In the bodies they are
behind an Identity that stops gradients, for second derivatives, which are taken of the inlined bodies.
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
    """Y = (x - mean) / stdev, mean and stdev = sqrt(variance + epsilon), the statistics over `axes`.

    x: `[batch, ..., n]`; epsilon: scalar; mean and stdev have size 1 along `axes`.
    """
    centered, mean, stdev = _standard(op, x, epsilon, axes)
    return op.Div(centered, stdev), mean, stdev


@composite("ReversibleInstanceNormalization", ["x", "weight", "bias", "epsilon"], _AXES, outputs=4)
def reversible_instance_normalization(
    op: Emitter, x: ir.Value, weight: ir.Value, bias: ir.Value, epsilon: ir.Value, axes: AttributeRef
) -> tuple[ir.Value, ...]:
    """Y = (x - mean) * (weight / stdev) + bias, mean, stdev, and x - mean for the gradient.

    weight and bias: `[n]`; the others as in InstanceStandardization.
    """
    centered, mean, stdev = _standard(op, x, epsilon, axes)
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
    """ReversibleInstanceNormalization: cotangents of x, weight and bias.

    `rows`: all axes but the last; `axes`: those of them along which stdev has size 1.
    """
    return op.Mul(ct, op.Div(weight, stdev)), *_of_parameters(op, ct, centered, stdev, axes, rows)


@composite("ReversibleInstanceNormalizationParameterGradient", ["ct", "centered", "stdev"], _SUMS, outputs=2)
def reversible_instance_normalization_parameter_gradient(
    op: Emitter,
    ct: ir.Value,
    centered: ir.Value,
    stdev: ir.Value,
    axes: AttributeRef,
    rows: AttributeRef,
) -> tuple[ir.Value, ...]:
    """ReversibleInstanceNormalization: cotangents of weight and bias, where x needs none."""
    return _of_parameters(op, ct, centered, stdev, axes, rows)


def _standard(
    op: Emitter, x: ir.Value, epsilon: ir.Value, axes: AttributeRef
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Returns x - mean, mean and stdev."""
    over = op.ints(axes)
    mean = op.stop_gradient(op.ReduceMean(x, over, keepdims=1))
    centered = op.Sub(x, mean)
    variance = op.ReduceMean(op.Mul(centered, centered), over, keepdims=1)
    return centered, mean, op.stop_gradient(op.Sqrt(op.Add(variance, epsilon)))


def _of_parameters(
    op: Emitter, ct: ir.Value, centered: ir.Value, stdev: ir.Value, axes: AttributeRef, rows: AttributeRef
) -> tuple[ir.Value, ir.Value]:
    """Returns the sums of ct * centered / stdev and of ct; the quotient has one number per series."""
    over = op.ints(rows)
    series = op.ReduceSum(op.Mul(ct, centered), op.ints(axes), keepdims=1)
    ct_weight = op.ReduceSum(op.Div(series, stdev), over, keepdims=0)
    return ct_weight, op.ReduceSum(ct, over, keepdims=0)
