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
