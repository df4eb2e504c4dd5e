"""Convolutions as functions, which native kernels take the place of.

The gradients are `SpecializedOp`s, made by the rule of Conv.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import AttributeRef, Emitter

from ._composite import composite

__all__ = ["convolution"]

_GEOMETRY = {
    "strides": ir.AttributeType.INTS,
    "dilations": ir.AttributeType.INTS,
    "pads": ir.AttributeType.INTS,
    "group": ir.AttributeType.INT,
}


@composite("Convolution", ["x", "w", "b"], _GEOMETRY)
def convolution(
    op: Emitter,
    x: ir.Value,
    w: ir.Value,
    b: ir.Value,
    *,
    strides: AttributeRef,
    dilations: AttributeRef,
    pads: AttributeRef,
    group: AttributeRef,
) -> ir.Value:
    """Conv, with its padding written out; b may be left out."""
    return op.Conv(x, w, b, strides=strides, dilations=dilations, pads=pads, group=group)
