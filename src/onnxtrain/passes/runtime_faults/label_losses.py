"""Write the reduction of a loss of class labels as nodes of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.passes.tidy.replace_value import successor


def is_reduced(node: ir.Node) -> bool:
    """Return whether a node is a loss of class labels of float32 that is reduced to a scalar."""
    if node.domain != "" or node.op_type not in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"):
        return False
    scores, labels = node.inputs[:2]
    if scores is None or labels is None or labels.dtype is None or labels.shape is None:
        return False
    return scores.dtype == ir.DataType.FLOAT and node.attributes.get_string("reduction", "mean") != "none"


def reduce_apart(node: ir.Node) -> None:
    """Let a loss of class labels give the loss of each label, and reduce these by standard ops behind it.

    ONNX Runtime (1.32) has no kernel for either loss and runs them by their bodies of standard ops, whose sums no pass
    can reach.
    """
    labels, weight = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    assert labels is not None
    mean = node.attributes.get_string("reduction", "mean") == "mean"
    ignored = node.attributes.get("ignore_index")
    result, each = successor(node.outputs[0]), node.outputs[0]
    each.name, each.type = f"{result.name}/each", ir.TensorType(ir.DataType.FLOAT)
    node.attributes["reduction"] = ir.AttrString("reduction", "none")
    write = _WriterBehind(node)
    if not mean or (weight is None and ignored is None):
        write.reduction("ReduceMean" if mean else "ReduceSum", each, labels, result)
        return
    terms = write.number(1, ir.DataType.FLOAT) if weight is None else None
    if ignored is not None:
        assert labels.dtype is not None
        counts = write("Not", write("Equal", labels, write.number(ignored.as_int(), labels.dtype)))
        # An ignored label such as -100 is no class: no Gather may see it.
        if weight is not None:
            terms = write("Gather", weight, write("Where", counts, labels, write.number(0, labels.dtype)))
        terms = write("Where", counts, terms, write.number(0, ir.DataType.FLOAT))
    else:
        terms = write("Gather", weight, labels)
    sums = [write.reduction("ReduceSum", values, labels) for values in (each, terms)]
    write("Div", *sums, output=result)


class _WriterBehind:
    """Writes nodes of standard ops behind a node, one after the other."""

    def __init__(self, node: ir.Node) -> None:
        self._last = node

    def __call__(
        self, op_type: str, *inputs: ir.Value | None, output: ir.Value | None = None, **attributes: Any
    ) -> ir.Value:
        """Write one node; return its output."""
        node = ir.node(op_type, inputs, attributes, outputs=None if output is None else [output])
        assert self._last.graph is not None
        self._last.graph.insert_after(self._last, node)
        self._last = node
        return node.outputs[0]

    def number(self, value: float, dtype: ir.DataType) -> ir.Value:
        """Write a scalar constant of a dtype."""
        return self("Constant", value=ir.tensor(np.array(value, dtype.numpy()), dtype=dtype))

    def reduction(
        self, op_type: str, values: ir.Value, labels: ir.Value, output: ir.Value | None = None
    ) -> ir.Value:
        """Write a reduction to a scalar of float32 values, one for each label."""
        values.shape, values.type = labels.shape, ir.TensorType(ir.DataType.FLOAT)
        return self(op_type, values, output=output, keepdims=0)
