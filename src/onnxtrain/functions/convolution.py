"""Convolutions as functions, which native kernels take the place of.

The gradients are `SpecializedOp`s, made by the rule of Conv; :func:`of_rounded` makes those in bfloat16.
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
    """Conv, with its padding written out; b may be left out."""
    return op.Conv(x, w, b, **geometry)


@composite("ConvolutionBfloat16", ["x", "w", "b"], _GEOMETRY)
def convolution_bfloat16(
    op: Emitter, x: ir.Value, w: ir.Value, b: ir.Value, **geometry: AttributeRef
) -> ir.Value:
    """Convolution of x and w rounded to bfloat16; b is not rounded."""
    return op.Conv(rounded(op, x), rounded(op, w), b, **geometry)
