"""Reductions."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import defvjp
from onnxtrain.emitter import Emitter

__all__ = ["expand_reduced"]


def expand_reduced(op: Emitter, n: NodeView, value: ir.Value) -> ir.Value:
    """Returns `value`, of the shape of the reduction's output, repeated along the reduced axes of its input."""
    if not n.attr("keepdims"):
        if n.axes is not None:
            value = op.Unsqueeze(value, n.axes)
        else:
            value = op.Reshape(value, op.Expand(op.const([1]), op.Shape(op.shape_of(n.data))))
    return op.Expand(value, op.shape_of(n.data))  # type: ignore[no-any-return]


defvjp("ReduceSum", data=lambda op, n, ct: expand_reduced(op, n, ct))
