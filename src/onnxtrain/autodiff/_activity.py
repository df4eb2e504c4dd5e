"""Which values lie between what is differentiated and what it is differentiated with respect to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import onnx_ir as ir

from onnxtrain.passes import BODIES, is_stop_gradient

from ._registry import NonDifferentiable, is_straight_through, reason_not_yet, rule_for


def is_differentiable_dtype(value: ir.Value) -> bool:
    """Whether a value can carry a cotangent: floating point, or of a dtype not known."""
    return value.dtype is None or value.dtype.is_floating_point()


def _carries_gradient(value: ir.Value) -> bool:
    """Whether a value must have a cotangent, be it only to find that its op has no rule (quantization to integers).

    Integers also of an op that becomes others which quantize: whether one of these has a rule is found then.
    """
    producer = value.producer()
    return is_differentiable_dtype(value) or (
        producer is not None
        and (
            reason_not_yet(producer) is not None
            or is_straight_through(value)
            or (producer.domain, producer.op_type) in BODIES
        )
    )


def active_values(nodes: Iterable[ir.Node], of: Iterable[ir.Value], wrt: Iterable[ir.Value]) -> set[ir.Value]:
    """Returns the values that depend on one of `wrt`, and one of `of` on them, through differentiable ops.

    Args:
        nodes: what there is in between, in order.
        of: what is differentiated.
        wrt: with respect to these.

    Integers that an op makes of others, moving or choosing them as Reshape and MaxPool do, carry a cotangent if these
    do.
    """
    leaves = set(wrt)
    dependent = set(leaves)
    passing = [
        node
        for node in nodes
        if not (isinstance(rule_for(node), NonDifferentiable) or is_stop_gradient(node))
    ]
    for node in passing:
        if any(value in dependent for value in reads(node)):
            moved = {value.dtype for value in node.inputs if value in dependent}
            dependent.update(
                value for value in node.outputs if _carries_gradient(value) or value.dtype in moved
            )
    reaching = set(of)
    for node in reversed(passing):
        if any(value in reaching for value in node.outputs):
            reaching.update(value for value in reads(node) if value in dependent)
    return dependent & reaching


def captured_values(node: ir.Node) -> Iterator[ir.Value]:
    """The values of enclosing graphs that the subgraphs of a control-flow node read."""
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            yield from _outer_values(attribute.as_graph())


def path_to_leaf(start: ir.Node, of: ir.Value, leaves: Iterable[ir.Value], active: set[ir.Value]) -> str:
    """Describes the path from `of` through `start` to the nearest leaf, for error messages."""
    goal = set(leaves)
    queue = deque(value for value in reads(start) if value in active)
    seen = set(queue)
    while queue:
        value = queue.popleft()
        if value in goal:
            return f"on the path from {of.name!r} to {value.name!r}"
        producer = value.producer()
        for source in reads(producer) if producer is not None else ():
            if source in active and source not in seen:
                seen.add(source)
                queue.append(source)
    return f"on the path from {of.name!r}"


def reads(node: ir.Node) -> Iterator[ir.Value]:
    """The inputs of a node that are there, and what its subgraphs read of enclosing graphs."""
    yield from (value for value in node.inputs if value is not None)
    yield from captured_values(node)


def _outer_values(graph: ir.Graph) -> Iterator[ir.Value]:
    for node in graph.all_nodes():
        for value in node.inputs:
            if value is not None and value.graph is not graph and not _within(value, graph):
                yield value
    for value in graph.outputs:
        if value.graph is not graph:
            yield value


def _within(value: ir.Value, graph: ir.Graph) -> bool:
    return any(subgraph is value.graph for subgraph in graph.subgraphs())
