"""Remove nodes and initializers that nothing reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir


def is_read(value: ir.Value) -> bool:
    """Return whether a node reads the value, or it is an output of its graph."""
    return bool(value.uses()) or value.is_graph_output()


def remove_unread_nodes(graph: ir.Graph, among: Collection[ir.Node] | None = None) -> bool:
    """Remove the nodes whose results nothing reads, and those that only they read; return whether there are any.

    Args:
        graph: A graph, topologically sorted.
        among: Nodes that may be removed; None allows all.
    """
    modified = False
    # Backwards, so that one walk also finds the nodes that only removed ones read.
    for node in reversed(graph):
        if (among is None or node in among) and not any(map(is_read, node.outputs)):
            _remove(graph, node)
            modified = True
    return modified


def remove_unread_chains(graph: ir.Graph, ends: Iterable[ir.Node | None]) -> None:
    """Remove nodes whose results nothing reads, and then the unread ones among the nodes before them.

    Args:
        graph: The graph; nodes of other graphs stay.
        ends: Nodes to start from. None stands for the missing producer of an input.
    """
    # No walk through the whole graph: callers do this for each of many nodes.
    nodes = list(ends)
    while nodes:
        node = nodes.pop()
        if node is not None and node.graph is graph and not any(map(is_read, node.outputs)):
            nodes += [value.producer() for value in node.inputs if value is not None]
            _remove(graph, node)


def remove_unread_initializers(graph: ir.Graph, values: Iterable[ir.Value | None]) -> None:
    """Remove those of `values` that are initializers which nothing reads; graph inputs stay."""
    # ONNX Runtime warns of every initializer that nothing reads.
    for value in values:
        if value is None or is_read(value) or value.is_graph_input():
            continue
        if graph.initializers.get(str(value.name)) is value:
            del graph.initializers[str(value.name)]


def read_nothing(subgraph: ir.Graph) -> None:
    """Disconnect the nodes of a dropped subgraph from their inputs.

    onnx_ir counts them as readers otherwise, and values around the subgraph that only they read would never be removed.
    """
    for node in subgraph.all_nodes():
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)


def _remove(graph: ir.Graph, node: ir.Node) -> None:
    """Remove a node, and its subgraphs as readers of other values."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            read_nothing(attribute.as_graph())
    graph.remove(node, safe=True)
