"""Decomposes elementwise com.microsoft ops into standard ops."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff._bodies import defbody
from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff.rules.contrib._shared import MS
from onnxtrain.emitter import Emitter


@defbody("BiasAdd", MS, "X bias skip", "Y")
def bias_add(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes BiasAdd: Y = X + bias + skip."""
    return op.Add(op.Add(n.X, n.bias), n.skip)
