"""Replaces Swish with Sigmoid and Mul at opsets where ONNX Runtime cannot run it."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.tidy.replace_value import replace_node, write_before

# The opset that introduced Swish, at which ONNX Runtime knows its function body.
_FUNCTION_SINCE = 24


class SwishPass(ir.passes.InPlacePass):
    """Rewrites Swish as x·Sigmoid(alpha·x) in models of opset 25 and later.

    ONNX Runtime (1.31 and 1.32) has no kernel for Swish. It runs the function body, but only finds it at opset 24: a
    model of opset 25 with a Swish does not load.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the model in place, including subgraphs; values keep their names."""
        if model.graph.opset_imports[""] <= _FUNCTION_SINCE:
            return ir.passes.PassResult(model, False)
        nodes = [
            node
            for node in ir.traversal.RecursiveGraphIterator(model.graph)
            if (node.domain, node.op_type) == ("", "Swish")
        ]
        for node in nodes:
            _write(node)
        return ir.passes.PassResult(model, bool(nodes))


def _write(node: ir.Node) -> None:
    """Replaces a Swish with x·Sigmoid(alpha·x)."""
    x = node.inputs[0]
    alpha, scaled = node.attributes.get_float("alpha", 1.0), x
    if alpha != 1.0:
        factor = write_before(node, "alpha", "Constant", value_float=alpha)
        # The dtype of x may be unknown; CastLike applies it.
        factor = write_before(node, "alpha_like", "CastLike", factor, x)
        scaled = write_before(node, "scaled", "Mul", x, factor)
    gate = write_before(node, "gate", "Sigmoid", scaled)
    gate.type, gate.shape = node.outputs[0].type, node.outputs[0].shape
    replace_node(node, write_before(node, "swish", "Mul", x, gate))
