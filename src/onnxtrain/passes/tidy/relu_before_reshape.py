"""Moves a Relu before the Reshape that it reads."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.tidy.reads import read_once


class ReluBeforeReshapePass(ir.passes.InPlacePass):
    """Rewrites Relu(Reshape(x)) as Reshape(Relu(x)) if nothing else reads the reshaped value.

    PyTorch computes a linear layer of a tensor with several batch axes as Gemm between two Reshapes. With the Relu
    right after the Gemm, both become one native op, and backward doesn't read the result of a Reshape, which ONNX
    Runtime would copy.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the model in place; both nodes keep the names of their outputs."""
        modified = False
        for relu in tuple(model.graph):
            reshape = _reshape_before(relu)
            if reshape is None:
                continue
            source, reshaped, rectified = reshape.inputs[0], reshape.outputs[0], relu.outputs[0]
            assert source is not None
            rectified.replace_all_uses_with(reshaped)
            rectified.type, rectified.shape = source.type, source.shape
            relu.replace_input_with(0, source)
            reshape.replace_input_with(0, rectified)
            model.graph.remove(relu)
            model.graph.insert_before(reshape, relu)
            modified = True
        return ir.passes.PassResult(model, modified)


def _reshape_before(node: ir.Node) -> ir.Node | None:
    """Returns the Reshape that a Relu alone reads; None for other nodes, and for an output of the graph."""
    # A Reshape that computes an output of the graph would copy it.
    moves = (node.op_type, node.domain) == ("Relu", "") and not node.outputs[0].is_graph_output()
    value = node.inputs[0] if moves else None
    reshape = value.producer() if value is not None else None
    if value is None or reshape is None or (reshape.op_type, reshape.domain) != ("Reshape", ""):
        return None
    return reshape if read_once(value) else None
