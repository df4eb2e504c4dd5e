"""Compute products with quantised weights in floating point throughout."""

from __future__ import annotations

import onnx_ir as ir


class FloatProductsPass(ir.passes.InPlacePass):
    """Let onnxruntime's products with quantised weights, such as MatMulNBits, keep activations in floating point.

    With `accuracy_level=4`, which onnxruntime-genai's model builder writes, the kernels round activations to int8. A
    product that a gradient passes is written as its body, which dequantises the weights and multiplies in floating
    point. A graph with both kinds computes neither the file's numbers nor those of the dequantised weights.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite all such nodes, also in subgraphs."""
        modified = False
        for node in ir.traversal.RecursiveGraphIterator(model.graph):
            if node.domain == "com.microsoft" and "accuracy_level" in node.attributes:
                del node.attributes["accuracy_level"]  # 0, the default: that of the inputs
                modified = True
        return ir.passes.PassResult(model, modified)
