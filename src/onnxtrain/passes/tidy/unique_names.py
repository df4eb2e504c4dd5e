"""Give values of subgraphs names of their own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import onnx_ir as ir


def name_apart(model: ir.Model) -> None:
    """Name values of subgraphs that have no name, or that of another value, in place.

    What passes write is named by the graph that it is written to, which knows its own names only, and constants are
    lifted out of it afterwards. ONNX allows one name in two branches or bodies side by side, but onnx (1.23) keeps
    by name what it propagates of shape computations, and takes that of one for the other's.
    """
    bodies = list(model.graph.subgraphs())
    if not bodies:
        return
    seen = {value.name for value in values_of(model.graph)}
    taken = seen.union(value.name for body in bodies for value in values_of(body))
    for value in (value for body in bodies for value in values_of(body)):
        if value.name is None or (value.name and value.name in seen):
            value.name = numbered(value.name or "value", taken)
        seen.add(value.name)


def numbered(base: str, taken: set[str | None]) -> str:
    """Return `base_2`, ... whichever is not taken yet, and take it."""
    names = (f"{base}_{count}" for count in itertools.count(2))
    name = next(name for name in names if name not in taken)
    taken.add(name)
    return name


def values_of(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield the inputs, initializers and results of nodes of a graph, without those of its subgraphs."""
    yield from (*graph.inputs, *graph.initializers.values())
    yield from (value for node in graph for value in node.outputs)


def fresh_name(model: ir.Model, base: str) -> str:
    """Return `base`, or `base_2`, ... where a value of the model has that name already."""
    taken = {value.name for graph in model.graphs() for value in values_of(graph)}
    return numbered(base, taken) if base in taken else base
