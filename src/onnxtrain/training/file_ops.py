"""Computes the results of a training graph by the ops of the file, in the places of which bodies of other ops stand.

Some ops have no gradient rule, but a body of standard ops, e.g. GroupQueryAttention, which is differentiated. Bodies
add in another order than ONNX Runtime's kernel, so that results differ in the last bit. In a file that rounds
activations to int8, a number between two steps is then rounded the other way, and the loss is not that of the file.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import values_by_name
from onnxtrain.op_facts import RANDOM_OPS


def restore_file_ops(training: ir.Model, forward: ir.Model) -> None:
    """Adds the ops of the file beside their bodies; whatever reads the result of a body then reads that of the op.

    The gradients of a body are as exact with the results of the op: both differ by rounding alone.

    Args:
        training: the graph with gradients, changed in place. Bodies have the names of results that the ops had.
        forward: the graph before bodies were written.
    """
    values = values_by_name(training.graph)
    restored = False
    for node in forward.graph:
        body = values.get(str(node.outputs[0].name))
        producer = None if body is None else body.producer()
        if producer is None or (producer.domain, producer.op_type) == (node.domain, node.op_type):
            continue
        # A second mask would not be that of the gradient.
        if node.op_type in RANDOM_OPS or "Dropout" in node.op_type:
            continue
        _restore(training.graph, node, values)
        restored = True
    if restored:
        # The new nodes were written behind their readers.
        training.graph.sort()


def _restore(graph: ir.Graph, node: ir.Node, values: dict[str, ir.Value]) -> None:
    """Adds a copy of a node, and lets the readers of its body's results read those of the copy."""
    inputs = [None if value is None else values[str(value.name)] for value in node.inputs]
    copy = ir.Node(
        node.domain, node.op_type, inputs, list(node.attributes.values()), num_outputs=len(node.outputs), name=node.name
    )  # fmt: skip
    graph.append(copy)
    for old, new in zip(node.outputs, copy.outputs, strict=True):
        new.type, new.shape = old.type, old.shape
        of_body = values.get(str(old.name)) if old.name else None
        # Gradients read results of the body that nothing else reads, e.g. the deviation of SkipLayerNormalization,
        # which ONNX Runtime's kernel (1.32) leaves at zero. GroupQueryAttention has to compute its own: DropCachePass.
        if of_body is None or not (old.uses() or old.is_graph_output()):
            new.name = f"{old.name}.of_file" if old.name else old.name
            continue
        of_body.replace_all_uses_with(new, replace_graph_outputs=True)
        of_body.name, new.name = f"{old.name}.of_body", old.name
        values[str(old.name)] = new
