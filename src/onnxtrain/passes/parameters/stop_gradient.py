"""Recognise the places where a PyTorch model stops gradients by `detach()` or `stop_gradient`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import onnx_ir as ir

from onnxtrain.passes.tidy.constants import known_array
from onnxtrain.passes.tidy.unused import remove_unread_initializers

# Metadata of a node by the Dynamo exporter: the operation in PyTorch, e.g.
# "%detach : [num_users=1] = call_function[target=torch.ops.aten.detach.default](args = (%x,), kwargs = {})".
_KEY, _ORIGIN = "pkg.torch.onnx.fx_node", "aten.detach"
# The lines of source code that led to the operation, innermost last.
_SOURCE = "pkg.torch.onnx.stack_trace"
_DETACHED, _OPERAND = re.compile(r"%detach\w*"), re.compile(r"%\w+")


def is_stop_gradient(node: ir.Node) -> bool:
    """Return whether `node` is an Identity that PyTorch's exporter has written for a `detach()`."""
    return (
        node.op_type == "Identity"
        and node.domain == ""
        and any(_ORIGIN in text for text in node.metadata_props.values())
    )


def mark_stop_gradient(identity: ir.Node) -> None:
    """Mark an Identity as a stop of gradients for :func:`is_stop_gradient`; the mark survives cloning and saving."""
    identity.metadata_props[_KEY] = f"{_ORIGIN}.default"


def mark_stopped_gradients(model: ir.Model) -> ir.Model:
    """Turn each `Where(true, x, x)` into an Identity that stops gradients, in place; return `model`.

    `onnxtrain.nn.stop_gradient` is exported as such a Where, as exporters remove every Identity. No other code has a
    reason to choose between a value and itself. The constant is removed if nothing else reads it.
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
    """Tell if a Where is `Where(true, x, x)` with a scalar constant `true`."""
    condition, first, second = node.inputs
    if first is not second:
        return False
    chosen = known_array(condition)
    return chosen is not None and chosen.ndim == 0 and bool(chosen)


def lost_detaches(graph: ir.Graph, active: Collection[ir.Value]) -> Iterator[ir.Node]:
    """Yield the nodes through which gradients flow although the PyTorch model stops them by `detach()`.

    The optimizer of PyTorch's exporter removes the Identity of a `detach()`, but the metadata of its readers still
    names it as an operand. If the readers have been merged with other nodes, only their line of source code is left.

    Args:
        graph: Main graph of a model.
        active: Values that gradients flow through.
    """
    texts = [node.metadata_props.get(_KEY, "") for node in graph if is_stop_gradient(node)]
    # Names of the detaches that still stop gradients, e.g. {"%detach_1"}.
    kept = {name.group() for text in texts if (name := _DETACHED.match(text))}
    for node in graph:
        if not any(value in active for value in node.outputs):
            continue
        operands = set(_OPERAND.findall(node.metadata_props.get(_KEY, "").partition("args = ")[2]))
        lost = {name for name in operands if _DETACHED.fullmatch(name)} - kept
        carrying = {value for value in node.inputs if value is not None and value in active}
        line = node.metadata_props.get(_SOURCE, "").rpartition("\n")[2]
        # The reader's other operands may carry gradients. If more of its inputs do than it has other operands, one of
        # these inputs was detached.
        if (lost and len(carrying) > len(operands - lost)) or (not kept and ".detach()" in line):
            yield node
