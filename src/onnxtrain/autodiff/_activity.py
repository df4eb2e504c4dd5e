"""Finds active values: the values through which gradients flow from the differentiated values to the leaves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import onnx_ir as ir

from onnxtrain.op_bodies import op_bodies
from onnxtrain.op_facts import STEPS
from onnxtrain.passes import is_stop_gradient, reads

from ._registry import NonDifferentiable, is_straight_through, reason_not_yet, rule_for


def is_differentiable_dtype(value: ir.Value) -> bool:
    """True if a value can have a cotangent: its dtype is floating point or unknown."""
    return value.dtype is None or value.dtype.is_floating_point()


def _carries_gradient(value: ir.Value) -> bool:
    """True if gradients may flow through this output of an active op.

    Integer outputs carry gradients if the op has a straight-through rule, or a body that may contain an op with one.
    They also do if the op is declared `not_yet`, so that the missing rule raises an error.
    """
    producer = value.producer()
    # Without the `not_yet` ops, the gradient would silently be zero at a quantized value instead of raising an error.
    return is_differentiable_dtype(value) or (
        producer is not None
        and (
            reason_not_yet(producer) is not None
            or is_straight_through(value)
            or (producer.domain, producer.op_type) in op_bodies()
        )
    )


def active_values(
    nodes: Iterable[ir.Node],
    of: Iterable[ir.Value],
    wrt: Iterable[ir.Value],
    *,
    through_steps: bool = False,
) -> set[ir.Value]:
    """Returns all values on paths of differentiable ops from values in `wrt` to values in `of`, including both ends.

    Integers are active where straight-through gradients flow: outputs of quantizing ops, and outputs with the same
    integer dtype as an active input, e.g. of Reshape or MaxPool.

    Args:
        nodes: nodes of the graph, in topological order.
        of: differentiated values, e.g. the loss.
        wrt: values that get gradients, e.g. the parameters.
        through_steps: True to follow Round, Floor, Ceil and Sign as well; PyTorch returns zero gradients for these.
    """
    leaves = set(wrt)
    dependent = set(leaves)
    # Active values depend on the leaves (forward pass) and reach `of` (backward pass).
    passing = [
        node
        for node in nodes
        if not (isinstance(rule_for(node), NonDifferentiable) or is_stop_gradient(node))
        or (through_steps and node.domain == "" and node.op_type in STEPS)
    ]
    for node in passing:
        if any(value in dependent for value in reads(node)):
            # Ops such as Reshape give their integer outputs the input's dtype. Shape does not, but it has no rule
            # anyway.
            moved = {value.dtype for value in node.inputs if value in dependent}
            dependent.update(
                value for value in node.outputs if _carries_gradient(value) or value.dtype in moved
            )
    reaching = set(of)
    for node in reversed(passing):
        if any(value in reaching for value in node.outputs):
            reaching.update(value for value in reads(node) if value in dependent)
    return dependent & reaching


def path_to_leaf(start: ir.Node, of: ir.Value, leaves: Iterable[ir.Value], active: set[ir.Value]) -> str:
    """Describes where a node lies for error messages, e.g. "on the path from 'loss' to 'conv1.weight'".

    Args:
        start: the node. The message names the nearest leaf that it depends on.
        of: the differentiated value.
        leaves: values that get gradients.
        active: values through which gradients flow.
    """
    # Breadth-first search, so that the message names the nearest parameter.
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
