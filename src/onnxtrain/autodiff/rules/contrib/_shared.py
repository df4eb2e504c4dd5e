"""What the rules of onnxruntime's domain com.microsoft have in common."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.emitter import Emitter
from onnxtrain.errors import NoGradientRule

MS = "com.microsoft"

CONV = {
    "auto_pad": "NOTSET",
    "dilations": None,
    "group": 1,
    "kernel_shape": None,
    "pads": None,
    "strides": None,
}
"""Attributes of convolutions, and what they are by default."""


def refused(n: NodeView, what: str) -> NoGradientRule:
    """Returns the error for an input or attribute that asks for what is not written in standard ops."""
    return NoGradientRule(
        f"differentiating {n.node.domain or 'ai.onnx'}.{n.op_type}: {what} cannot be written in standard ops here. "
        "Freeze what lies before it, or start from the model before onnxruntime's optimizer or builder"
    )


def channels_first(op: Emitter, value: ir.Value, rank: int) -> ir.Value:
    """Returns images, or weights, whose channels were last as the standard ops have them."""
    result: ir.Value = op.Transpose(value, perm=[0, rank - 1, *range(1, rank - 1)])
    return result


def channels_last(op: Emitter, value: ir.Value, rank: int) -> ir.Value:
    """Returns images with their channels behind the spatial axes."""
    result: ir.Value = op.Transpose(value, perm=[0, *range(2, rank), 1])
    return result
