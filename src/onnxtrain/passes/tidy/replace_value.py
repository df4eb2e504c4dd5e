"""Inserts nodes, and replaces nodes and values while keeping the names of graph outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir


def stand_in(output: ir.Value, result: ir.Value, before: ir.Node) -> None:
    """Redirects all readers of a node's output to another value; a graph output keeps its name.

    Args:
        output: output of a node, unread afterwards.
        result: the replacement value.
        before: if `output` is a graph output, and `result` an input, initializer or another output of the graph, an
            Identity of `result` with the output's name is inserted before this node.
    """
    if not output.is_graph_output():
        output.replace_all_uses_with(result)
        return
    producer = result.producer()
    if producer is not None and producer.graph is before.graph and not result.is_graph_output():
        result.name, output.name = output.name, None
        output.replace_all_uses_with(result, replace_graph_outputs=True)
        return
    kept = successor(output)
    kept.type, kept.shape = result.type, result.shape
    before.prepend(ir.node("Identity", [result], outputs=[kept]))


def successor(output: ir.Value) -> ir.Value:
    """Returns a new value that takes over the name, readers and graph outputs of a node's output.

    Use it to insert a node after `output`: the caller makes the new value an output of another node, which usually
    reads `output`. Afterwards, `output` has no name.
    """
    value = ir.Value(name=output.name, type=output.type, shape=output.shape)
    output.name = None
    output.replace_all_uses_with(value, replace_graph_outputs=True)
    return value


def replace_node(node: ir.Node, result: ir.Value) -> None:
    """Removes a node with one output and redirects its readers to `result`.

    If `result` has no dtype or shape, it gets the output's.
    """
    output = node.outputs[0]
    result.type = output.type if result.type is None else result.type
    result.shape = output.shape if result.shape is None else result.shape
    stand_in(output, result, node)
    assert node.graph is not None
    node.graph.remove(node, safe=True)


def write_before(
    node: ir.Node, role: str | None, op_type: str, *inputs: ir.Value | None, **attributes: Any
) -> ir.Value:
    """Inserts a node of a standard op before `node`; returns its output, without dtype and shape.

    Args:
        node: the node before which the new one is inserted.
        role: purpose of the new output, e.g. "axes" for the name `<first output of node>/axes`. If None, onnx_ir
            numbers the output. Use None if the first output of `node` may be omitted, or if roles would repeat.
        op_type: op of the new node, e.g. "Slice".
        inputs: inputs of the new node.
        attributes: attributes of the new node.
    """
    new = ir.node(op_type, inputs, attributes)
    if role is not None:
        new.outputs[0].name = f"{node.outputs[0].name}/{role}"
    node.prepend(new)
    return new.outputs[0]


class WriterBefore:
    """Writes nodes of standard ops before a given node: `write("Add", value, 1)` returns the output of an Add.

    Integers and lists of integers become int64 constants. Other packages use :class:`onnxtrain.emitter.Emitter`, which
    imports this package.

    Args:
        node: the node before which the new nodes are inserted.
    """

    def __init__(self, node: ir.Node) -> None:
        self._node = node

    def __call__(
        self, op_type: str, *inputs: ir.Value | int | Sequence[int] | None, **attributes: Any
    ) -> ir.Value:
        """Inserts a node and returns its first output, without dtype and shape."""
        values = [self._constant(x) if isinstance(x, int | Sequence) else x for x in inputs]
        return write_before(self._node, None, op_type, *values, **attributes)

    def _constant(self, value: int | Sequence[int]) -> ir.Value:
        # Constant nodes, because function bodies have no initializers.
        name = "value_int" if isinstance(value, int) else "value_ints"
        return write_before(self._node, None, "Constant", **{name: value})

    def number(self, value: float, dtype: ir.DataType) -> ir.Value:
        """Inserts a scalar Constant of `dtype` and returns its output."""
        tensor = ir.tensor(np.array(value, dtype.numpy()), dtype=dtype)
        return write_before(self._node, None, "Constant", value=tensor)

    def size(self, value: ir.Value, axis: int) -> ir.Value:
        """Emits the size of an axis, int64 [1]."""
        return self("Shape", value, start=axis, end=axis + 1)

    def range(self, start: int | ir.Value, count: ir.Value) -> ir.Value:
        """Emits `count` (int64 [1]) consecutive integers, beginning with `start`."""
        stop = self("Add", self("Squeeze", count), start)
        return self("Range", start, stop, 1)
