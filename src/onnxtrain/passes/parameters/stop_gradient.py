"""Finds where a PyTorch model stops gradients with `detach()` or `stop_gradient`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import onnx_ir as ir

from onnxtrain.passes.tidy.constants import known_array
from onnxtrain.passes.tidy.unused import remove_unread_initializers

# Node metadata of the Dynamo exporter with the PyTorch operation, e.g. "%detach : [num_users=1] =
# call_function[target=torch.ops.aten.detach.default](args = (%x,), kwargs = {})".
_KEY, _ORIGIN = "pkg.torch.onnx.fx_node", "aten.detach"
# Stack trace of the operation, innermost line last.
_SOURCE = "pkg.torch.onnx.stack_trace"
_DETACHED, _OPERAND = re.compile(r"%detach\w*"), re.compile(r"%\w+")


def is_stop_gradient(node: ir.Node) -> bool:
    """True if `node` is an Identity that stops gradients.

    The Dynamo exporter writes such nodes for `detach()`, and :func:`mark_stop_gradient` turns an Identity into one.
    """
    return (
        node.op_type == "Identity"
        and node.domain == ""
        and any(_ORIGIN in text for text in node.metadata_props.values())
    )


def mark_stop_gradient(identity: ir.Node) -> None:
    """Marks an Identity as stopping gradients, see :func:`is_stop_gradient`; cloning and saving preserve the mark."""
    identity.metadata_props[_KEY] = f"{_ORIGIN}.default"


def mark_stopped_gradients(model: ir.Model) -> ir.Model:
    """Turns each `Where(true, x, x)` into an Identity that stops gradients, in place; returns `model`.

    `onnxtrain.nn.stop_gradient` is exported as such a Where, because exporters remove every Identity. Other code has no
    reason to select between a value and itself. The constant is removed if nothing else reads it.
    """
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type == "Where" and node.domain == "" and _is_identity_where(node):
            condition, value = node.inputs[:2]
            node.op_type = "Identity"
            node.resize_inputs(1)
            node.replace_input_with(0, value)
            mark_stop_gradient(node)
            remove_unread_initializers(model.graph, [condition])
    return model


def _is_identity_where(node: ir.Node) -> bool:
    """True if a Where is `Where(true, x, x)` with a scalar constant `true`."""
    condition, first, second = node.inputs
    if first is not second:
        return False
    chosen = known_array(condition)
    return chosen is not None and chosen.ndim == 0 and bool(chosen)


def lost_detaches(graph: ir.Graph, active: Collection[ir.Value]) -> Iterator[ir.Node]:
    """Yields the nodes through which gradients flow although the PyTorch model stops them with `detach()`.

    The optimizer of PyTorch's exporter removes the Identity that a `detach()` is exported as. A node that read the
    detached tensor still has the detach as an operand in its metadata, unless the node was merged with others. If no
    detach is left in the graph, a node is also yielded if its metadata has a source line with `.detach()`.

    Args:
        graph: main graph of a model.
        active: values through which gradients flow.
    """
    texts = [node.metadata_props.get(_KEY, "") for node in graph if is_stop_gradient(node)]
    # Names of the remaining detaches, e.g. {"%detach_1"}.
    kept = {name.group() for text in texts if (name := _DETACHED.match(text))}
    for node in graph:
        if not any(value in active for value in node.outputs):
            continue
        operands = set(_OPERAND.findall(node.metadata_props.get(_KEY, "").partition("args = ")[2]))
        lost = {name for name in operands if _DETACHED.fullmatch(name)} - kept
        carrying = {value for value in node.inputs if value is not None and value in active}
        line = node.metadata_props.get(_SOURCE, "").rpartition("\n")[2]
        # The reader's other operands may carry gradients. If more of its inputs carry gradients than it has other
        # operands, one of these inputs was detached.
        if (lost and len(carrying) > len(operands - lost)) or (not kept and ".detach()" in line):
            yield node
