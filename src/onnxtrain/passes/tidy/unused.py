"""Removes unread nodes and initializers."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir


def is_read(value: ir.Value) -> bool:
    """True if a value is an input of a node or an output of its graph."""
    return bool(value.uses()) or value.is_graph_output()


def remove_unread_nodes(graph: ir.Graph, among: Collection[ir.Node] | None = None) -> bool:
    """Eliminates dead nodes in place: nodes whose outputs are unused, or used only by other dead nodes.

    Args:
        graph: a topologically sorted graph. Dead nodes in its subgraphs are not removed.
        among: nodes that may be removed. Default: all.

    Returns:
        True if any node was removed.
    """
    modified = False
    # In reverse order, so that the consumers of a node are removed before the node is checked.
    for node in reversed(graph):
        if (among is None or node in among) and not any(map(is_read, node.outputs)):
            _remove(graph, node)
            modified = True
    return modified


def remove_unread_chains(graph: ir.Graph, ends: Iterable[ir.Node | None]) -> None:
    """Removes nodes with unused outputs, then the producers of their inputs if these have become unused, and so on.

    Args:
        graph: the graph, modified in place. Nodes of other graphs, such as subgraphs, are not removed.
        ends: nodes to start from. None is ignored, e.g. the producer of a graph input.
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
    """Disconnects the nodes of a dropped subgraph and of its nested subgraphs from their inputs.

    Otherwise values of enclosing graphs would keep these uses, and their producers would never be removed as dead.
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
