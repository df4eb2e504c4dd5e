"""Defines convolutions as functions that native kernels can replace.

Their gradients are `SpecializedOp`s, which the rules of Conv and ConvTranspose define; :func:`of_rounded` derives the
bfloat16 versions.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import AttributeRef, Emitter

from ._composite import composite
from .bfloat16 import rounded

_GEOMETRY = {
    "strides": ir.AttributeType.INTS,
    "dilations": ir.AttributeType.INTS,
    "pads": ir.AttributeType.INTS,
    "group": ir.AttributeType.INT,
}


@composite("Convolution", ["x", "w", "b"], _GEOMETRY)
def convolution(op: Emitter, x: ir.Value, w: ir.Value, b: ir.Value, **geometry: AttributeRef) -> ir.Value:
    """Computes Conv. b is optional. Calls must set all attributes."""
    # auto_pad is not an attribute: kernels get explicit pads.
    return op.Conv(x, w, b, **geometry)


@composite("ConvolutionTranspose", ["x", "w", "b"], _GEOMETRY | {"output_padding": ir.AttributeType.INTS})
def convolution_transpose(
    op: Emitter, x: ir.Value, w: ir.Value, b: ir.Value, **geometry: AttributeRef
) -> ir.Value:
    """Computes ConvTranspose. b is optional. Calls must set all attributes."""
    return op.ConvTranspose(x, w, b, **geometry)


@composite("ConvolutionBfloat16", ["x", "w", "b"], _GEOMETRY)
def convolution_bfloat16(
    op: Emitter, x: ir.Value, w: ir.Value, b: ir.Value, **geometry: AttributeRef
) -> ir.Value:
    """Computes Convolution with x and w rounded to bfloat16. b is not rounded."""
    return op.Conv(rounded(op, x), rounded(op, w), b, **geometry)
