"""What the rules of onnxruntime's domain com.microsoft have in common."""

from __future__ import annotations

from onnxtrain.autodiff._node import NodeView
from onnxtrain.errors import NoGradientRule

__all__ = ["CONV", "MS", "refused"]

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
        f"differentiating {n.node.domain or 'ai.onnx'}.{n.op_type}: {what} are not written in standard ops here. "
        "Freeze what lies before it, or start from the model before onnxruntime's optimizer or builder"
    )
