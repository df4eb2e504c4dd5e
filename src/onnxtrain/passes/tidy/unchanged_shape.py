"""Removes Reshapes that don't change the shape."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.tidy.replace_value import replace_node


class UnchangedShapePass(ir.passes.InPlacePass):
    """Removes each Reshape whose input already has the shape of its output, if all sizes are known.

    ONNX Runtime (1.32) copies the input if the output is a graph output. Expects inferred shapes.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place."""
        modified = False
        for node in tuple(model.graph):
            x = node.inputs[0] if (node.op_type, node.domain) == ("Reshape", "") else None
            if (
                x is not None
                and x.shape is not None
                and x.shape.is_static()
                and x.shape == node.outputs[0].shape
            ):
                replace_node(node, x)
                modified = True
        return ir.passes.PassResult(model, modified)
