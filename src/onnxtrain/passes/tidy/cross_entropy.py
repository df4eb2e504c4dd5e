"""Splits the cross entropy of a matrix of logits into LogSoftmax and negative log-likelihood."""

from __future__ import annotations

import onnx_ir as ir


class CrossEntropyPass(ir.passes.InPlacePass):
    """Speeds up SoftmaxCrossEntropyLoss on 2-D logits by splitting it into LogSoftmax and NegativeLogLikelihoodLoss.

    ONNX Runtime runs the op's function body, which reshapes logits `[n, classes]` to `[n, classes, 1]`. LogSoftmax in
    the body then reads each row with a stride and copies the result.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the model in place; values keep their names."""
        modified = False
        for node in tuple(model.graph):
            if _is_of_matrix(node):
                _split(model.graph, node)
                modified = True
        return ir.passes.PassResult(model, modified)


def _is_of_matrix(node: ir.Node) -> bool:
    """True if a node is a SoftmaxCrossEntropyLoss whose logits are 2-D: `[n, classes]`."""
    if (node.op_type, node.domain) != ("SoftmaxCrossEntropyLoss", ""):
        return False
    scores = node.inputs[0]
    return scores is not None and scores.shape is not None and scores.shape.rank() == 2


def _split(graph: ir.Graph, node: ir.Node) -> None:
    """Inserts a LogSoftmax before a SoftmaxCrossEntropyLoss, which becomes a NegativeLogLikelihoodLoss."""
    scores, old = node.inputs[0], node.outputs[1] if len(node.outputs) > 1 else None
    assert scores is not None
    # The optional second output of the op is the log-softmax; its readers and graph outputs keep its name.
    name = (old.name if old is not None else None) or f"{node.outputs[0].name}_log_probabilities"
    log_prob = ir.Value(name=name, type=scores.type, shape=scores.shape)
    graph.insert_before(node, ir.node("LogSoftmax", [scores], attributes={"axis": 1}, outputs=[log_prob]))
    if old is not None:
        old.name = None
        old.replace_all_uses_with(log_prob, replace_graph_outputs=True)
        node.resize_outputs(1)
    # Both ops have the same other inputs and attributes: labels, weights, reduction and ignore_index.
    node.op_type = "NegativeLogLikelihoodLoss"
    node.replace_input_with(0, log_prob)
