"""What a loss of a model is the mean over: read off the losses that it is made of."""

from __future__ import annotations

import json
from typing import Any

import onnx_ir as ir

from onnxtrain.losses._base import MEAN_KEY
from onnxtrain.op_facts import CASTS, VIEWS

_UNKNOWN = "{}"
_SUM = "null"
_SAME = VIEWS | CASTS | {"Neg"}
_SCALED = frozenset({"Div", "Mul"})
_ADDED = frozenset({"Add", "Sub", "Sum"})


def loss_mean(loss: ir.Value) -> dict[str, Any] | None:
    """Returns what a loss is the mean over, as the manifest says it (see :meth:`Loss.mean_over`).

    Multiples of a loss are the mean over the same, so are sums of such losses, and a mean to which something is added
    that depends on no input (a penalty on the weights). Whatever else is the mean over samples, as far as is known.
    """
    result: dict[str, Any] | None = json.loads(_described(loss) or _UNKNOWN)
    return result


def _described(value: ir.Value) -> str | None:
    """The JSON of what a value is the mean over; None where it is the same for every batch."""
    if MEAN_KEY in value.metadata_props:
        return value.metadata_props[MEAN_KEY]
    node = value.producer()
    known = node is not None and node.domain == ""
    if node is not None and known and node.op_type in _SAME:
        return _described(_operands(node)[0])
    if node is not None and known and node.op_type in _SCALED:
        parts = [_described(operand) for operand in _operands(node)]
        if parts.count(None) == 1:
            return _UNKNOWN if node.op_type == "Div" and parts[0] is None else parts[0] or parts[1]
    elif node is not None and known and node.op_type in _ADDED:
        parts = [_described(operand) for operand in _operands(node)]
        varying = {part for part in parts if part is not None}
        if len(varying) == 1 and not (None in parts and _SUM in varying):
            return varying.pop()
    return _UNKNOWN if _varies(value) else None


def _operands(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None]


def _varies(value: ir.Value) -> bool:
    """Whether a value depends on an input of the graph."""
    seen = {value}
    todo = [value]
    while todo:
        current = todo.pop()
        if current.is_graph_input():
            return True
        node = current.producer()
        sources = [] if node is None else [v for v in _operands(node) if v not in seen]
        seen.update(sources)
        todo += sources
    return False
