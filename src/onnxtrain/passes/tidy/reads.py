"""Finds the values that a node reads, those of its subgraphs included, and the readers of a value."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir


def reads(node: ir.Node) -> Iterator[ir.Value]:
    """Yields all values that a node reads: its non-omitted inputs, and outer values captured by its subgraphs."""
    yield from (value for value in node.inputs if value is not None)
    yield from captured_values(node)


def captured_values(node: ir.Node) -> Iterator[ir.Value]:
    """Yields the values of enclosing graphs that the subgraphs of a control-flow node capture."""
    for attribute in node.attributes.values():
        # In a function body, an attribute may refer to an attribute of the function, which has no value here.
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            yield from _outer_values(attribute.as_graph())


def read_once(value: ir.Value) -> bool:
    """True if exactly one node reads a value, through any number of inputs, and the value is not a graph output."""
    # For example, a square reads its operand twice, but is one reader.
    return not value.is_graph_output() and len({id(use.node) for use in value.uses()}) == 1


def _outer_values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yields the values of enclosing graphs that the nodes and outputs of a subgraph use."""
    # `all_nodes` also visits nested subgraphs, whose own values aren't outer values either. `subgraphs` finds all
    # levels, so one call suffices.
    inside = {id(inner) for inner in (graph, *graph.subgraphs())}
    for node in graph.all_nodes():
        yield from (value for value in node.inputs if value is not None and id(value.graph) not in inside)
    for value in graph.outputs:
        if value.graph is not graph:
            yield value
