"""Rewrites running sums in float64 as a function that has a native kernel."""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.functions import running_sum
from onnxtrain.fusion._pass import KeepingPass, become
from onnxtrain.fusion._patterns import read_once
from onnxtrain.passes import is_long_sum, known_array, remove_unread_chains


class RunningSumPass(KeepingPass):
    """Replaces the float32 running sums that `LongSumsPass` computes in float64 with the function `RunningSum`.

    The body of the function is the nodes that it replaces: a Cast to float64, CumSum and a Cast back. On a stock
    runtime, the Casts take twice as long as the CumSum; the native kernel needs none.

    Run this pass after `LongSumsPass`. A sum is left unchanged if its axis is computed, or if another node reads one of
    its float64 values.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place; subgraphs are not modified."""
        op, modified = Emitter(model.graph, functions=model.functions), False
        for node in tuple(model.graph):
            found = None if self.keeps(node) else _running_sum(node)
            if found is None:
                continue
            flags = {name: found.node.attributes.get_int(name, 0) for name in ("exclusive", "reverse")}
            become(op, node, running_sum, {"axis": found.axis, **flags})
            node.replace_input_with(0, found.x)
            remove_unread_chains(op.graph, [found.node])
            modified = True
        return ir.passes.PassResult(model, modified)


class _RunningSum(NamedTuple):
    """A running sum in float64.

    Attributes:
        x: the float32 values that are summed.
        axis: the axis of the sum, e.g. -1.
        node: the CumSum.
    """

    x: ir.Value
    axis: int
    node: ir.Node


def _running_sum(last: ir.Node) -> _RunningSum | None:
    """Returns the running sum whose Cast to float32 is `last`, or None if `last` is no such node."""
    node = _sole_producer(last, "CumSum") if _is_cast(last, ir.DataType.FLOAT) else None
    first = None if node is None else _sole_producer(node, "Cast")
    if node is None or first is None or not is_long_sum(first):
        return None
    (x,), axis = first.inputs, known_array(node.inputs[1])
    if x is None or x.dtype != ir.DataType.FLOAT or axis is None or not _is_cast(first, ir.DataType.DOUBLE):
        return None
    return _RunningSum(x, int(axis.item()), node)


def _is_cast(node: ir.Node, dtype: ir.DataType) -> bool:
    return (node.op_type, node.domain) == ("Cast", "") and node.attributes.get_int("to", 0) == dtype


def _sole_producer(reader: ir.Node, op_type: str) -> ir.Node | None:
    """Returns the `op_type` node that computes the first input of `reader`, if no other node reads this value."""
    value = reader.inputs[0]
    source = None if value is None else value.producer()
    if value is None or source is None or (source.op_type, source.domain) != (op_type, ""):
        return None
    # Subgraphs are not rewritten.
    return source if read_once(value) and source.graph is reader.graph else None
