"""Moves the reduction of ONNX's classification losses into separate nodes, where other passes can rewrite it."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.tidy.replace_value import WriterBefore, successor

_FLOAT = ir.DataType.FLOAT


def is_reduced(node: ir.Node) -> bool:
    """True if a node is a float32 classification loss (NLL or softmax cross-entropy) with reduction mean or sum.

    False if the dtype or rank of its labels is unknown.
    """
    if node.domain != "" or node.op_type not in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"):
        return False
    logits, labels = node.inputs[:2]
    if logits is None or labels is None or labels.dtype is None or labels.shape is None:
        return False
    return logits.dtype == _FLOAT and node.attributes.get_string("reduction", "mean") != "none"


def separate_reduction(node: ir.Node) -> None:
    """Sets the reduction of a classification loss to "none", and adds nodes that compute the sum or weighted mean.

    ONNX Runtime (1.32) has no kernel for these losses. It runs their function bodies, whose sums no pass can rewrite.

    Args:
        node: a loss for which :func:`is_reduced` is True; modified in place.
    """
    labels, weight = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    assert labels is not None
    mean = node.attributes.get_string("reduction", "mean") == "mean"
    ignored = node.attributes.get("ignore_index")
    result, each = successor(node.outputs[0]), node.outputs[0]
    each.name, each.type, each.shape = f"{result.name}/each", ir.TensorType(_FLOAT), labels.shape
    node.attributes["reduction"] = ir.AttrString("reduction", "none")
    if not mean or (weight is None and ignored is None):
        op_type = "ReduceMean" if mean else "ReduceSum"
        node.append(ir.node(op_type, [each], {"keepdims": 0}, outputs=[result]))
        return
    quotient = ir.Node("", "Div", [None, None], outputs=[result])
    node.append(quotient)
    write = WriterBefore(quotient)
    terms = write.number(1, _FLOAT) if weight is None else None
    if ignored is not None:
        assert labels.dtype is not None
        counts = write("Not", write("Equal", labels, write.number(ignored.as_int(), labels.dtype)))
        # Gather must not read ignored labels: -100, for example, is out of range.
        if weight is not None:
            terms = write("Gather", weight, write("Where", counts, labels, write.number(0, labels.dtype)))
        terms = write("Where", counts, terms, write.number(0, _FLOAT))
    else:
        terms = write("Gather", weight, labels)
    # The pass that rewrites long sums needs dtype and shape.
    terms.type, terms.shape = ir.TensorType(_FLOAT), labels.shape
    for index, values in enumerate((each, terms)):
        quotient.replace_input_with(index, write("ReduceSum", values, keepdims=0))
