"""Computes the results of a training graph by the ops that ONNX Runtime computes those of the file with.

Some ops have no gradient rule, but a body of standard ops, e.g. GroupQueryAttention, which is differentiated. Bodies
add in another order than ONNX Runtime's kernel, so that results differ in the last bit. In a file that rounds
activations to int8, a number between two steps is then rounded the other way, and the loss is not that of the file.

ONNX Runtime itself joins some ops of a file into one. In a training graph it finds other readers of their results, the
gradients, and leaves them as they are.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import values_by_name
from onnxtrain.op_facts import RANDOM_OPS


def join_skip_norms(model: ir.Model) -> None:
    """Joins each Add and the LayerNormalization behind it that ONNX Runtime (1.32) joins when it opens the file.

    The kernel of SkipLayerNormalization rounds otherwise than the two ops.
    """
    for node in list(model.graph):
        if (node.domain, node.op_type) == ("", "LayerNormalization") and _is_joined(node):
            _join(model.graph, node)
            model.opset_imports.setdefault("com.microsoft", 1)


def _is_joined(norm: ir.Node) -> bool:
    """Says if ONNX Runtime joins a LayerNormalization with the Add in front of it."""
    total = norm.inputs[0]
    add = None if total is None else total.producer()
    if total is None or add is None or (add.domain, add.op_type) != ("", "Add"):
        return False
    if total.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        return False
    read = [value for value in norm.outputs[1:] if value.uses() or value.is_graph_output()]
    if read or len(total.uses()) > 1 or total.is_graph_output():
        return False
    shapes = [None if value is None else value.shape for value in add.inputs]
    if any(shape is None or len(shape) != 3 for shape in shapes) or norm.attributes.get_int(
        "axis", -1
    ) not in (-1, 2):
        return False
    # Symbolic sizes count as equal.
    sizes = [
        [size if isinstance(size, int) else None for size in shape] for shape in shapes if shape is not None
    ]
    return sizes[0] == sizes[1]


def _join(graph: ir.Graph, norm: ir.Node) -> None:
    """Writes a SkipLayerNormalization in the place of a LayerNormalization and the Add in front of it."""
    total = norm.inputs[0]
    assert total is not None
    add = total.producer()
    assert add is not None
    output = norm.outputs[0]
    epsilon = ir.AttrFloat32("epsilon", norm.attributes.get_float("epsilon", 1e-5))
    joined = ir.Node(
        "com.microsoft", "SkipLayerNormalization", [*add.inputs, *norm.inputs[1:]], [epsilon], name=norm.name
    )
    new = joined.outputs[0]
    new.type, new.shape = output.type, output.shape
    graph.insert_before(norm, joined)
    name = output.name
    output.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove([norm, add], safe=True)
    new.name = name


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
