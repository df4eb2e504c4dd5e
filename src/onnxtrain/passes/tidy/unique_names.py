"""Find names that no value of a model has."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import onnx_ir as ir


def name_apart(model: ir.Model) -> None:
    """Rename values of subgraphs whose name another value has, and name those without a name, in place.

    ONNX allows one name in two branches side by side. But onnx's shape inference (1.23) stores propagated shape data by
    name, and would take the data of one value for the other's. New nodes in a subgraph get names that are unique in
    that subgraph alone, and their constants are lifted to the main graph afterwards.
    """
    bodies = list(model.graph.subgraphs())
    if not bodies:
        return
    seen = {value.name for value in values_of(model.graph)}
    taken = seen.union(value.name for body in bodies for value in values_of(body))
    for value in (value for body in bodies for value in values_of(body)):
        # An empty name is that of an omitted output; None is no name yet.
        if value.name is None or (value.name and value.name in seen):
            value.name = numbered(value.name or "value", taken)
        seen.add(value.name)


def numbered(base: str, taken: set[str | None]) -> str:
    """Return the first of `base_2`, `base_3`, ... that is not in `taken`, and add it there."""
    names = (f"{base}_{count}" for count in itertools.count(2))
    name = next(name for name in names if name not in taken)
    taken.add(name)
    return name


def values_of(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield the inputs, initializers and results of nodes of a graph, without those of its subgraphs."""
    yield from (*graph.inputs, *graph.initializers.values())
    yield from (value for node in graph for value in node.outputs)


def fresh_name(model: ir.Model, base: str) -> str:
    """Return `base` if no value of the model has that name, else `base_2` or the next free number."""
    taken = {value.name for graph in model.graphs() for value in values_of(graph)}
    return numbered(base, taken) if base in taken else base
