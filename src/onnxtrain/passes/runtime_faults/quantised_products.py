"""Keep activations in floating point in products with quantised weights."""

from __future__ import annotations

import onnx_ir as ir


class FloatProductsPass(ir.passes.InPlacePass):
    """Remove `accuracy_level` from onnxruntime's products with quantised weights, such as MatMulNBits.

    With `accuracy_level=4`, which onnxruntime-genai's model builder writes, kernels round activations to int8.
    Gradients are those of products in floating point, and so is the forward graph after this pass.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite all such nodes, also in subgraphs."""
        modified = False
        for node in ir.traversal.RecursiveGraphIterator(model.graph):
            if node.domain == "com.microsoft" and "accuracy_level" in node.attributes:
                # The default, 0, computes in the dtype of the inputs.
                del node.attributes["accuracy_level"]
                modified = True
        return ir.passes.PassResult(model, modified)
