"""What every pipeline does to a graph that has just been differentiated."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from onnxtrain.passes.broadcast import ImplicitExpandPass
from onnxtrain.passes.products import TransposedProductPass

__all__ = ["simplify_gradients"]


def simplify_gradients(model: ir.Model) -> None:
    """Rewrite what rules of single ops write and one would not write by hand: no transposed product, no repetition."""
    if TransposedProductPass()(model).modified | ImplicitExpandPass()(model).modified:
        common.RemoveUnusedNodesPass()(model)
