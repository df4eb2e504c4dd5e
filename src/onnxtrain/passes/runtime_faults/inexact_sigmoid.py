"""Replaces Sigmoid with its formula, because ONNX Runtime's kernel has a large relative error for negative inputs."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.tidy.replace_value import replace_node, write_before


class ExactSigmoidPass(ir.passes.InPlacePass):
    """Rewrites float32 Sigmoid as 1 / (1 + exp(-x)).

    The CPU kernel of ONNX Runtime (1.30 to 1.32) has an absolute error of 6e-8. Its result is off by half for x = -16
    and 0 for x <= -18, where the logarithm and the binary cross-entropy of the result are far from PyTorch's.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the model in place, including subgraphs; values keep their names."""
        nodes = [
            node
            for node in ir.traversal.RecursiveGraphIterator(model.graph)
            if (node.domain, node.op_type) == ("", "Sigmoid") and node.outputs[0].dtype == ir.DataType.FLOAT
        ]
        for node in nodes:
            x, y = node.inputs[0], node.outputs[0]
            one = write_before(node, "one", "Constant", value_float=1.0)
            negative = write_before(node, "negative", "Neg", x)
            exponential = write_before(node, "exponential", "Exp", negative)
            divisor = write_before(node, "divisor", "Add", exponential, one)
            for value in (negative, exponential, divisor):
                value.type, value.shape = y.type, y.shape
            replace_node(node, write_before(node, "sigmoid", "Reciprocal", divisor))
        return ir.passes.PassResult(model, bool(nodes))
