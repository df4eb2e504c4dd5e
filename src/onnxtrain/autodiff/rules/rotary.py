"""Registers the VJP of rotary position embeddings."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff._broadcast import sum_to_shape_of
from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import Cotangents
from onnxtrain.autodiff.rules._composite import composite_vjp
from onnxtrain.emitter import Emitter
from onnxtrain.functions import rotary, rotary_gradient, rotated


@composite_vjp(rotary, ("y",))
def _rotary(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Rotary, y = x * cos + rotated(x) * sin."""
    result: dict[str, ir.Value] = {}
    if n.needs("x"):
        result["x"] = op.call(rotary_gradient, ct, n.cos, n.sin)
    # Learned angles are rare, so their cotangents are standard ops.
    if n.needs("cos"):
        result["cos"] = sum_to_shape_of(op, op.Mul(ct, n.x), n.x, n.cos)
    if n.needs("sin"):
        result["sin"] = sum_to_shape_of(op, op.Mul(ct, rotated(op, n.x)), n.x, n.sin)
    return result
