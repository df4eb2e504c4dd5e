"""Recognise where the gradients of a PyTorch model stop."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import onnx_ir as ir

from onnxtrain.passes.tidy.unused import remove_unread_initializers

_KEY, _ORIGIN = "pkg.torch.onnx.fx_node", "aten.detach"
_SOURCE = "pkg.torch.onnx.stack_trace"
_DETACHED, _OPERAND = re.compile(r"%detach\w*"), re.compile(r"%\w+")


def is_stop_gradient(node: ir.Node) -> bool:
    """Return whether `node` is the Identity that torch's exporter leaves of a `detach()`."""
    return (
        node.op_type == "Identity"
        and node.domain == ""
        and any(_ORIGIN in text for text in node.metadata_props.values())
    )


def mark_stop_gradient(identity: ir.Node) -> None:
    """Mark an Identity so that :func:`is_stop_gradient` knows it; the mark survives cloning and saving."""
    identity.metadata_props[_KEY] = f"{_ORIGIN}.default"


def mark_stopped_gradients(model: ir.Model) -> ir.Model:
    """Turn each `Where(true, x, x)` into a marked Identity, in place; return `model`.

    `onnxtrain.nn.stop_gradient` is exported as such a Where, because exporters remove every Identity. It says that
    no gradient passes: code that computes something has no reason to choose between a value and itself by a
    constant. The constant is removed when nothing else reads it.
    """
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type == "Where" and node.domain == "" and _chooses_nothing(node):
            condition, value = node.inputs[:2]
            node.op_type = "Identity"
            node.resize_inputs(1)
            node.replace_input_with(0, value)
            mark_stop_gradient(node)
            remove_unread_initializers(model.graph, [condition])
    return model


def _chooses_nothing(node: ir.Node) -> bool:
    condition, first, second = node.inputs
    if first is not second or condition is None or condition.is_graph_input():
        return False
    tensor = ir.convenience.get_const_tensor(condition)
    return tensor is not None and tensor.shape.rank() == 0 and bool(tensor.numpy())


def lost_detaches(graph: ir.Graph, active: Collection[ir.Value]) -> Iterator[ir.Node]:
    """Yield the nodes through which gradients flow although PyTorch's `detach` would stop them.

    The optimizer of torch's exporter removes the Identity of a `detach`, but what it notes of the nodes that read
    the result still names it. Where it has merged even those with others, there is only the line of source.

    Args:
        graph: The main graph of a model.
        active: The values that gradients flow through.
    """
    texts = [node.metadata_props.get(_KEY, "") for node in graph if is_stop_gradient(node)]
    kept = {name.group() for text in texts if (name := _DETACHED.match(text))}
    for node in graph:
        if not any(value in active for value in node.outputs):
            continue
        operands = set(_OPERAND.findall(node.metadata_props.get(_KEY, "").partition("args = ")[2]))
        lost = {name for name in operands if _DETACHED.fullmatch(name)} - kept
        carrying = {value for value in node.inputs if value is not None and value in active}
        line = node.metadata_props.get(_SOURCE, "").rpartition("\n")[2]
        if (lost and len(carrying) > len(operands - lost)) or (not kept and ".detach()" in line):
            yield node
