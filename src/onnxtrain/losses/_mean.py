"""Determines whether a loss is averaged over samples or labels, even for combinations like 0.5·loss_a + loss_b."""

from __future__ import annotations

import json
from typing import Any

import onnx_ir as ir

from onnxtrain.losses._base import MEAN_KEY
from onnxtrain.losses._label_ops import LABEL_OPS, label_mean
from onnxtrain.op_facts import CASTS, VIEWS

# JSON of `Loss.mean_over`. An unknown loss is assumed to be a mean over samples, by far the most common case.
_UNKNOWN = "{}"
_SUM = "null"
# The sign of a loss does not matter for averaging batches.
_SAME = VIEWS | CASTS | {"Neg"}
_SCALED = frozenset({"Div", "Mul"})
_ADDED = frozenset({"Add", "Sub", "Sum"})


def loss_mean(loss: ir.Value) -> dict[str, Any] | None:
    """Determines what a model's total loss is averaged over: samples, non-ignored labels, or nothing (a sum).

    Recognizes onnxtrain's losses and ONNX's classification losses (:data:`LABEL_OPS`), and these combinations of them:
    a loss times a constant, a sum or difference of losses that are averaged over the same thing, and a mean plus a term
    that does not depend on any input, such as a weight penalty.

    Args:
        loss: the total loss, a value of the model.

    Returns:
        The description returned by :meth:`Loss.mean_over`: {} for a mean over samples, None for a sum. {} for a loss
        that is not recognized, because most losses are means over samples.
    """
    result: dict[str, Any] | None = json.loads(_described(loss) or _UNKNOWN)
    return result


def _described(value: ir.Value) -> str | None:
    """Describes what a value is averaged over, as the JSON of `Loss.mean_over`, e.g. "null" for a sum.

    Returns:
        The JSON; None (not "null") if the value depends on no graph input, e.g. for a weight penalty.
    """
    if MEAN_KEY in value.metadata_props:
        return value.metadata_props[MEAN_KEY]
    node = value.producer()
    kind = "" if node is None or node.domain else node.op_type
    if node is not None and kind in LABEL_OPS and value is node.outputs[0]:
        return json.dumps(label_mean(node))
    if kind in _SAME:
        # The other operands of these ops are shapes or axes.
        return _described(_operands(value)[0])
    if kind in _SCALED or kind in _ADDED:
        parts = [_described(operand) for operand in _operands(value)]
        varying = {part for part in parts if part is not None}
        # One factor is the loss, and the other one is the same for every batch. A quotient by a loss is not a mean.
        if kind in _SCALED and parts.count(None) == 1:
            return _UNKNOWN if kind == "Div" and parts[0] is None else varying.pop()
        # A sum over samples plus a penalty is not a sum over samples, because the penalty does not grow with the batch.
        if kind in _ADDED and len(varying) == 1 and not (None in parts and _SUM in varying):
            return varying.pop()
    return _UNKNOWN if _varies(value) else None


def _operands(value: ir.Value) -> list[ir.Value]:
    """Returns the inputs of the node that computes a value; [] for a graph input or an initializer."""
    node = value.producer()
    return [] if node is None else [operand for operand in node.inputs if operand is not None]


def _varies(value: ir.Value) -> bool:
    """True if a value depends on an input of the graph."""
    # Not recursive, because a chain of nodes may be longer than Python's stack.
    seen = {value}
    todo = [value]
    while todo:
        current = todo.pop()
        if current.is_graph_input():
            return True
        sources = set(_operands(current)) - seen
        seen |= sources
        todo += sources
    return False
