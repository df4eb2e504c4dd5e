"""Rewrites the mean loss for class labels as a function that has a native kernel."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.functions import mean_negative_log_likelihood
from onnxtrain.fusion._pass import KeepingPass, become
from onnxtrain.passes import CrossEntropyPass


class MeanLossPass(KeepingPass):
    """Rewrites float32 NegativeLogLikelihoodLoss with reduction "mean" as a function that has a native kernel.

    The loss must have int64 labels, an `ignore_index` and no class weights. `SoftmaxCrossEntropyLoss` of a matrix is
    first split into LogSoftmax and this loss (:class:`CrossEntropyPass`).

    ONNX Runtime expands the op into 19 ops, which take longer than the rest of a small network. Run this pass last,
    because the function has no gradient rule.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place; subgraphs are not modified."""
        modified = CrossEntropyPass()(model).modified
        nodes = [node for node in model.graph if _is_mean(node) and not self.keeps(node)]
        if not nodes:
            return ir.passes.PassResult(model, modified)
        op = Emitter(model.graph, functions=model.functions)
        for node in nodes:
            ignored = {"ignore_index": node.attributes["ignore_index"].as_int()}
            become(op, node, mean_negative_log_likelihood, ignored)
        return ir.passes.PassResult(model, True)


def _is_mean(node: ir.Node) -> bool:
    """True if a node is a mean loss that `mean_negative_log_likelihood` can compute."""
    if (node.op_type, node.domain) != ("NegativeLogLikelihoodLoss", "") or len(node.inputs) > 2:
        return False
    log_prob, labels = node.inputs
    return (
        log_prob is not None
        and log_prob.dtype == ir.DataType.FLOAT
        and labels is not None
        and labels.dtype == ir.DataType.INT64
        and "ignore_index" in node.attributes
        and node.attributes.get_string("reduction", "mean") == "mean"
    )
