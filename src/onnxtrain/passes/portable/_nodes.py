"""Finds the nodes of a model that a pass of this folder rewrites, and writes small constants beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxtrain.passes.tidy.constants import known_array
from onnxtrain.passes.tidy.replace_value import write_before


def standard_nodes(model: ir.Model, op_type: str) -> list[ir.Node]:
    """List the nodes of a standard op in the graph, its subgraphs and the model-local functions."""
    return [node for node in every_node(model) if node.domain == "" and node.op_type == op_type]


def every_node(model: ir.Model) -> Iterator[ir.Node]:
    """Yield the nodes of the graph, its subgraphs and the model-local functions."""
    # Functions too: runtimes replace calls by the bodies, and then have the ops of the bodies to run.
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        yield from ir.traversal.RecursiveGraphIterator(graph)


def constant_input(node: ir.Node, index: int) -> npt.NDArray[np.generic] | None:
    """Return the value of an input that is a constant; None if it is absent or computed."""
    return known_array(node.inputs[index]) if index < len(node.inputs) else None


class WriterBefore:
    """Write nodes of standard ops before a node: `write("Add", value, 1)` returns the value of an Add.

    Integers and lists of integers become int64 constants.

    Args:
        node: The node to write before.
    """

    def __init__(self, node: ir.Node) -> None:
        self._node = node

    def __call__(
        self, op_type: str, *inputs: ir.Value | int | Sequence[int] | None, **attributes: Any
    ) -> ir.Value:
        """Write one node; return its first output."""
        values = [self._constant(x) if isinstance(x, int | Sequence) else x for x in inputs]
        return write_before(self._node, None, op_type, *values, **attributes)

    def _constant(self, value: int | Sequence[int]) -> ir.Value:
        # Constant nodes and not initializers, which the bodies of functions do not have.
        name = "value_int" if isinstance(value, int) else "value_ints"
        return write_before(self._node, None, "Constant", **{name: value})

    def number(self, value: float, dtype: ir.DataType) -> ir.Value:
        """Write a scalar constant of a dtype."""
        tensor = ir.tensor(np.array(value, dtype.numpy()), dtype=dtype)
        return write_before(self._node, None, "Constant", value=tensor)

    def size(self, value: ir.Value, axis: int) -> ir.Value:
        """Write the size of an axis, int64 [1]."""
        return self("Shape", value, start=axis, end=axis + 1)

    def range(self, start: int | ir.Value, count: ir.Value) -> ir.Value:
        """Write the integers from `start`, `count` (int64 [1]) of them."""
        stop = self("Add", self("Squeeze", count), start)
        return self("Range", start, stop, 1)
