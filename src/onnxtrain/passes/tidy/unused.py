"""Removes unread nodes and initializers."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir


def is_read(value: ir.Value) -> bool:
    """True if a node reads the value, or it is an output of its graph."""
    return bool(value.uses()) or value.is_graph_output()


def remove_unread_nodes(graph: ir.Graph, among: Collection[ir.Node] | None = None) -> bool:
    """Removes nodes whose outputs nothing reads, or only removed nodes read. Returns True if there were any.

    Args:
        graph: a graph, topologically sorted.
        among: nodes that may be removed. Default: all.
    """
    modified = False
    # In reverse order, so that one pass also finds nodes that only removed ones read.
    for node in reversed(graph):
        if (among is None or node in among) and not any(map(is_read, node.outputs)):
            _remove(graph, node)
            modified = True
    return modified


def remove_unread_chains(graph: ir.Graph, ends: Iterable[ir.Node | None]) -> None:
    """Removes nodes with unread outputs, and then their producers if these have become unread.

    Args:
        graph: the graph; nodes of other graphs are not removed.
        ends: nodes to start from. None is ignored, e.g. if a graph input has no producer.
    """
    # Does not visit the whole graph, because callers do this for many nodes in turn.
    nodes = list(ends)
    while nodes:
        node = nodes.pop()
        if node is not None and node.graph is graph and not any(map(is_read, node.outputs)):
            nodes += [value.producer() for value in node.inputs if value is not None]
            _remove(graph, node)


def remove_unread_initializers(graph: ir.Graph, values: Iterable[ir.Value | None]) -> None:
    """Removes the unread initializers among `values`, except graph inputs."""
    # ONNX Runtime warns about unread initializers.
    for value in values:
        if value is None or is_read(value) or value.is_graph_input():
            continue
        if graph.initializers.get(str(value.name)) is value:
            del graph.initializers[str(value.name)]


def read_nothing(subgraph: ir.Graph) -> None:
    """Disconnects the nodes of a dropped subgraph from their inputs.

    Otherwise onnx_ir would count them as readers, so that values of enclosing graphs are never removed.
    """
    for node in subgraph.all_nodes():
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)


def _remove(graph: ir.Graph, node: ir.Node) -> None:
    """Removes a node, and disconnects its subgraphs from the values that they read."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            read_nothing(attribute.as_graph())
    graph.remove(node, safe=True)
