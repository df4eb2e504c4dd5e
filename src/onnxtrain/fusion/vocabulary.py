"""Makes the scores of many classes, their logarithms of probabilities and their cotangents take turns in one memory.

The scores of a vocabulary are the largest tensor of a language model, 65 MB for 512 tokens and 32,000 words. ONNX
Runtime's LogSoftmax writes a second one. It also computes the loss after the gradient, so that the gradient is a third.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.functions import (
    log_softmax_of_rows,
    mean_cross_entropy_gradient,
    softmax_cross_entropy_gradient,
)
from onnxtrain.fusion._pass import KeepingPass, become

_GRADIENTS = {
    composite.identifier(ir.DataType.FLOAT, {})[:2]
    for composite in (mean_cross_entropy_gradient, softmax_cross_entropy_gradient)
}

_MANY = 4096
"""Classes from which the memory of scores matters."""


class VocabularyLossPass(KeepingPass):
    """Rewrite LogSoftmax of many classes in float32, and delay its gradient as cross entropy until the loss is there.

    To be run last: other passes do not know the function. On a stock runtime its body is the LogSoftmax that was there.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place; subgraphs stay."""
        op: Emitter | None = None
        for node in tuple(model.graph):
            if _has_many_classes(node) and not self.keeps(node):
                # Made on demand: an Emitter reads all names of the graph.
                op = op or Emitter(model.graph, functions=model.functions)
                become(op, node, log_softmax_of_rows, {})
                _delay_gradient(op, node.outputs[0])
        return ir.passes.PassResult(model, op is not None)


def _has_many_classes(node: ir.Node) -> bool:
    """Tells if a node is a LogSoftmax along a last axis of many classes, in float32."""
    x = node.inputs[0] if (node.op_type, node.domain) == ("LogSoftmax", "") else None
    dims = None if x is None else static_dims(x)
    if x is None or x.dtype != ir.DataType.FLOAT or not dims or dims[-1] is None or dims[-1] < _MANY:
        return False
    return node.attributes.get_int("axis", -1) in (-1, len(dims) - 1)


def _delay_gradient(op: Emitter, log_prob: ir.Value) -> None:
    """Makes the gradient of a cross entropy wait for all other readers of `log_prob`, whose memory it then takes."""
    readers = list(dict.fromkeys(use.node for use in log_prob.uses()))
    gradients = [node for node in readers if (node.domain, node.op_type) in _GRADIENTS]
    others = [node for node in readers if node not in gradients]
    if len(gradients) != 1 or log_prob.is_graph_output():
        return
    gradient = gradients[0]
    scale = gradient.inputs[2]
    places = {node: place for place, node in enumerate(op.graph)}
    for other in others:
        result = other.outputs[0]
        # Readers behind the gradient in the file may depend on it. Only a floating-point signal can be waited for.
        if other not in places or places[other] > places[gradient] or result.dtype != ir.DataType.FLOAT:
            return
    assert scale is not None
    with op.placing(before=gradient):
        for other in others:
            delayed = op.reshape_after(scale, op.shape_of(scale), other.outputs[0])
            delayed.shape, delayed.type = scale.shape, scale.type
            scale = delayed
    gradient.replace_input_with(2, scale)
