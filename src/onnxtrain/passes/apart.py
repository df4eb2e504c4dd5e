"""Give values of subgraphs names of their own."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnxtrain.passes.mode import fresh_name

__all__ = ["name_apart"]


def name_apart(model: ir.Model) -> None:
    """Name values of subgraphs that have no name, or that of one around them, in place.

    What passes write is named by the graph that it is written to, which knows its own names only, and constants are
    lifted out of it afterwards.
    """
    _name_inside(model, model.graph, frozenset())


def _name_inside(model: ir.Model, graph: ir.Graph, outer: frozenset[str]) -> None:
    for value in _values(graph):
        if value.name in outer or (value.name is None and outer):
            value.name = fresh_name(model, value.name or "value")
    bodies = [
        attribute.as_graph()
        for node in graph
        for attribute in node.attributes.values()
        if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref()
    ]
    if bodies:
        here = outer.union(value.name for value in _values(graph) if value.name)
        for body in bodies:
            _name_inside(model, body, here)


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from (*graph.inputs, *graph.initializers.values())
    yield from (value for node in graph for value in node.outputs)
