"""Makes the forward half of a training graph run the file's fused ops.

The results of the forward half are then bit-equal to the deployed model's.

An op without a gradient rule, e.g. GroupQueryAttention, is differentiated through its function body of standard ops.
The body sums in a different order than ONNX Runtime's kernel, so the results differ in the last bit. If the file rounds
activations to int8, such a difference can change the rounded value, and with it the loss.

ONNX Runtime also fuses some ops when it opens a file. It cannot fuse them in a training graph, where gradients read the
intermediate results, so :func:`join_skip_norms` fuses them before the gradients are added.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import static_dims, values_by_name
from onnxtrain.op_facts import RANDOM_OPS


def join_skip_norms(model: ir.Model) -> None:
    """Fuses Add and LayerNormalization exactly as ONNX Runtime (1.32) does when it loads the deployed model.

    The fused op, SkipLayerNormalization, rounds differently than the two ops. In a training graph, ONNX Runtime cannot
    fuse them itself, so the results would differ from the deployed model's.
    """
    for node in list(model.graph):
        add = _joined_add(node)
        if add is not None:
            _join(model.graph, add, node)
            model.opset_imports.setdefault("com.microsoft", 1)


def _joined_add(norm: ir.Node) -> ir.Node | None:
    """Returns the Add that ONNX Runtime fuses with the LayerNormalization `norm`, or None if it fuses none."""
    total = norm.inputs[0] if norm.inputs else None
    add = None if total is None else total.producer()
    if (norm.domain, norm.op_type) != ("", "LayerNormalization") or total is None or add is None:
        return None
    if (add.domain, add.op_type) != ("", "Add") or total.dtype not in (
        ir.DataType.FLOAT,
        ir.DataType.FLOAT16,
    ):
        return None
    if len(total.uses()) > 1 or any(value.is_graph_output() for value in (total, *norm.outputs[1:])):
        return None
    if any(value.uses() for value in norm.outputs[1:]) or norm.attributes.get_int("axis", -1) not in (-1, 2):
        return None
    # Symbolic sizes count as equal.
    left, right = (None if value is None else static_dims(value) for value in add.inputs)
    return add if left is not None and len(left) == 3 and left == right else None


def _join(graph: ir.Graph, add: ir.Node, norm: ir.Node) -> None:
    """Replaces an Add and the LayerNormalization that follows it with one SkipLayerNormalization."""
    epsilon = ir.AttrFloat32("epsilon", norm.attributes.get_float("epsilon", 1e-5))
    joined = ir.Node(
        "com.microsoft", "SkipLayerNormalization", [*add.inputs, *norm.inputs[1:]], [epsilon], name=norm.name
    )
    old, new = norm.outputs[0], joined.outputs[0]
    new.type, new.shape = old.type, old.shape
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name, new.name = None, old.name
    graph.insert_before(norm, joined)
    graph.remove([norm, add], safe=True)


def restore_file_ops(training: ir.Model, forward: ir.Model) -> None:
    """Restores ops that were inlined for differentiation, so that results are bit-equal to the deployed model's.

    Each op is added to the training graph again, and nodes that read the results of its inlined function body read the
    results of the op instead. The gradients of the body remain accurate, because the two results differ only by
    rounding. Random ops are not restored: they would draw a different mask than the gradients use.

    Args:
        training: the graph with gradients, changed in place. The results of a body have the names of the op's results.
        forward: the graph before ops were replaced by their bodies.
    """
    values = values_by_name(training.graph)
    restored = False
    for node in forward.graph:
        body = values.get(str(node.outputs[0].name))
        producer = None if body is None else body.producer()
        if producer is None or (producer.domain, producer.op_type) == (node.domain, node.op_type):
            continue
        # A restored random op would draw a different mask than the one that the gradient uses.
        if node.op_type in RANDOM_OPS or "Dropout" in node.op_type:
            continue
        _restore(training.graph, node, values)
        restored = True
    if restored:
        # The new nodes were appended after their readers.
        training.graph.sort()


def _restore(graph: ir.Graph, node: ir.Node, values: dict[str, ir.Value]) -> None:
    """Adds a copy of `node` to the training graph, and redirects the readers of its inlined body's results to it.

    Args:
        graph: the training graph.
        node: a node of the forward graph.
        values: the training graph's values by name; the results of the copy replace those of the body.
    """
    inputs = [None if value is None else values[str(value.name)] for value in node.inputs]
    copy = ir.Node(
        node.domain, node.op_type, inputs, list(node.attributes.values()), num_outputs=len(node.outputs), name=node.name
    )  # fmt: skip
    graph.append(copy)
    for old, new in zip(node.outputs, copy.outputs, strict=True):
        new.type, new.shape = old.type, old.shape
        of_body = values.get(str(old.name)) if old.name else None
        # Results that only gradients read still come from the body, e.g. the deviation of SkipLayerNormalization, which
        # ONNX Runtime's kernel (1.32) leaves at zero. GroupQueryAttention has to compute its own: see DropCachePass.
        if of_body is None or not (old.uses() or old.is_graph_output()):
            new.name = f"{old.name}.of_file" if old.name else old.name
            continue
        of_body.replace_all_uses_with(new, replace_graph_outputs=True)
        of_body.name, new.name = f"{old.name}.of_body", old.name
        values[str(old.name)] = new
