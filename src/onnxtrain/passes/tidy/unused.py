"""Removing what nothing reads any more."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir


def is_read(value: ir.Value) -> bool:
    """Return whether a node reads the value, or it is an output of its graph."""
    return bool(value.uses()) or value.is_graph_output()


def remove_unread_nodes(graph: ir.Graph, among: Collection[ir.Node] | None = None) -> bool:
    """Remove the nodes whose results nothing reads, and what only they read; return whether there are any.

    Args:
        graph: The graph, sorted.
        among: The nodes that may go; None if any may.
    """
    modified = False
    for node in reversed(graph):
        if (among is None or node in among) and not any(map(is_read, node.outputs)):
            _remove(graph, node)
            modified = True
    return modified


def remove_unread_chains(graph: ir.Graph, ends: Iterable[ir.Node | None]) -> None:
    """Remove those of a few nodes, and of the nodes that these read, whose results nothing reads.

    Unlike `remove_unread_nodes` it does not walk through the graph.
    """
    nodes = list(ends)
    while nodes:
        node = nodes.pop()
        if node is not None and node.graph is graph and not any(map(is_read, node.outputs)):
            nodes += [value.producer() for value in node.inputs if value is not None]
            _remove(graph, node)


def remove_unread_initializers(graph: ir.Graph, values: Iterable[ir.Value | None]) -> None:
    """Remove those of the initializers of a graph that nothing reads, of which ONNX Runtime warns; inputs stay."""
    for value in values:
        if value is None or is_read(value) or value.is_graph_input():
            continue
        if graph.initializers.get(str(value.name)) is value:
            del graph.initializers[str(value.name)]


def read_nothing(subgraph: ir.Graph) -> None:
    """Take its inputs from every node of a subgraph that nobody runs, so that what it read has a reader less."""
    for node in subgraph.all_nodes():
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)


def _remove(graph: ir.Graph, node: ir.Node) -> None:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            read_nothing(attribute.as_graph())
    graph.remove(node, safe=True)
