"""Gradients of activations and normalised exponentials."""

from __future__ import annotations

import onnx_ir as ir

from ..emitter import AttributeRef, Emitter
from ._composite import composite

__all__ = ["softmax_gradient"]


@composite("SoftmaxGradient", ["y", "ct"], {"axis": ir.AttributeType.INT})
def softmax_gradient(op: Emitter, y: ir.Value, ct: ir.Value, *, axis: AttributeRef) -> ir.Value:
    """y * (ct - sum(ct * y, axis)), with y = softmax(x, axis)."""
    product = op.Mul(ct, y)
    total = op.ReduceSum(product, op.Unsqueeze(op.ints(axis), [0]), keepdims=1)
    return op.Sub(product, op.Mul(y, total))  # type: ignore[no-any-return]
