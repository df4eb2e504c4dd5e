"""Helpers for the other files of this folder: the domain, convolution attributes, an error, channel transposes."""

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
"""Attributes of convolutions with their defaults; None for no default."""


def unsupported(n: NodeView, what: str) -> NoGradientRule:
    """Returns the error for an input or attribute, described by `what`, that the body of an op does not support."""
    return NoGradientRule(
        f"differentiating {n.node.domain or 'ai.onnx'}.{n.op_type}: no gradient rule supports {what}. "
        "Freeze all parameters before it, or start from the model before onnxruntime's optimizer or model "
        "builder ran"
    )


def channels_first(op: Emitter, value: ir.Value, rank: int) -> ir.Value:
    """Transposes images or weights from channels-last to the layout of standard ops, `[batch, channels, ...]`."""
    result: ir.Value = op.Transpose(value, perm=[0, rank - 1, *range(1, rank - 1)])
    return result


def channels_last(op: Emitter, value: ir.Value, rank: int) -> ir.Value:
    """Transposes images from `[batch, channels, ...]` to channels-last."""
    result: ir.Value = op.Transpose(value, perm=[0, *range(2, rank), 1])
    return result
