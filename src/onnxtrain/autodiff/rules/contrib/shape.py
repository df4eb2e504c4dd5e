"""Writes ops of com.microsoft that move or select elements in standard ops."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import defbody
from onnxtrain.autodiff.rules.contrib._shared import MS
from onnxtrain.emitter import Emitter


@defbody("Trilu", MS, "X k", "Y", upper=1)
def trilu(op: Emitter, n: NodeView) -> ir.Value:
    """As the standard op."""
    return op.Trilu(n.X, *([n.k] if n.k is not None else []), upper=n.attr("upper"))


@defbody("ExpandDims", MS, "X axis", "Y")
def expand_dims(op: Emitter, n: NodeView) -> ir.Value:
    """Y = X with a new axis of size one at `axis`, a scalar of int32."""
    # `n.axis` is a method of NodeView, so this input is read by its index. Unsqueeze takes a vector of int64.
    return op.Unsqueeze(n.X, op.Reshape(op.Cast(n.inputs[1], to=ir.DataType.INT64), [1]))
