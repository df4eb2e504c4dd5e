"""Lets the logits over a vocabulary, their log-softmax and their cotangents share one buffer.

The logits over a vocabulary are the largest tensor of a language model: 65 MB for 512 tokens and 32,000 words. ONNX
Runtime's LogSoftmax allocates a second tensor of that size. By default, the loss is computed after the gradient, so the
gradient would be a third tensor of that size.
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

_MANY_CLASSES = 4096
"""Minimum number of classes for which the memory of the logits matters."""


class VocabularyLossPass(KeepingPass):
    """Replaces float32 LogSoftmax over at least 4096 classes with a function whose native kernel saves memory.

    The kernel overwrites the logits. The cross-entropy gradient is delayed until the loss has been computed, so that
    the gradient can reuse the buffer of the log-probabilities.

    Run this pass last: other passes don't recognize the function. On a stock runtime, the function runs its body, a
    plain LogSoftmax.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place; subgraphs are not modified."""
        op, modified = Emitter(model.graph, functions=model.functions), False
        for node in tuple(model.graph):
            if _has_many_classes(node) and not self.keeps(node):
                become(op, node, log_softmax_of_rows, {})
                _delay_gradient(op, node.outputs[0])
                modified = True
        return ir.passes.PassResult(model, modified)


def _has_many_classes(node: ir.Node) -> bool:
    """True if a node is a float32 LogSoftmax over a last axis of at least `_MANY_CLASSES` classes."""
    x = node.inputs[0] if (node.op_type, node.domain) == ("LogSoftmax", "") else None
    dims = None if x is None else static_dims(x)
    if x is None or x.dtype != ir.DataType.FLOAT or not dims or dims[-1] is None or dims[-1] < _MANY_CLASSES:
        return False
    return node.attributes.get_int("axis", -1) in (-1, len(dims) - 1)


def _delay_gradient(op: Emitter, log_prob: ir.Value) -> None:
    """Makes the cross-entropy gradient the last reader of `log_prob`, so that the gradient can reuse the buffer.

    Changes nothing if there is not exactly one such gradient, if another reader comes after it or does not return
    float32, or if `log_prob` is a graph output.
    """
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
        # Readers after the gradient may depend on it. Only floating-point signals are supported.
        if other not in places or places[other] > places[gradient] or result.dtype != ir.DataType.FLOAT:
            return
    assert scale is not None
    with op.placing(before=gradient):
        for other in others:
            delayed = op.reshape_after(scale, op.shape_of(scale), other.outputs[0])
            delayed.shape, delayed.type = scale.shape, scale.type
            scale = delayed
    gradient.replace_input_with(2, scale)
