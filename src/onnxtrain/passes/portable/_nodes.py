"""Finds nodes for the passes of this package."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxtrain.passes.tidy.constants import known_array


def standard_nodes(model: ir.Model, op_type: str) -> list[ir.Node]:
    """Returns the nodes of a standard op in the graph, its subgraphs and the model-local functions."""
    return [node for node in every_node(model) if node.domain == "" and node.op_type == op_type]


def every_node(model: ir.Model) -> Iterator[ir.Node]:
    """Yields the nodes of the graph, its subgraphs and the model-local functions."""
    # Including functions, because runtimes inline their bodies.
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        yield from ir.traversal.RecursiveGraphIterator(graph)


def constant_input(node: ir.Node, index: int) -> npt.NDArray[np.generic] | None:
    """Returns the value of a constant input, or None if the input is absent or computed."""
    return known_array(node.inputs[index]) if index < len(node.inputs) else None
