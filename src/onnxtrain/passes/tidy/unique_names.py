"""Makes names of values unique."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import onnx_ir as ir


def name_apart(model: ir.Model) -> None:
    """Renames values in subgraphs, in place, so that their names are unique across the model; names unnamed values.

    ONNX allows two branches to use the same name. But onnx's shape inference (1.23) stores propagated shape data by
    name and would confuse the two values. New nodes in a subgraph get names that are only unique within that subgraph,
    and their constants are later lifted to the main graph.
    """
    bodies = list(model.graph.subgraphs())
    if not bodies:
        return
    seen = {value.name for value in values_of(model.graph)}
    taken = seen.union(value.name for body in bodies for value in values_of(body))
    for value in (value for body in bodies for value in values_of(body)):
        # "" is the name of an omitted output; None means that the value has no name yet.
        if value.name is None or (value.name and value.name in seen):
            value.name = numbered(value.name or "value", taken)
        seen.add(value.name)


def numbered(base: str, taken: set[str | None]) -> str:
    """Returns the first of `base_2`, `base_3`, ... that is not in `taken`, and adds it to `taken`."""
    names = (f"{base}_{count}" for count in itertools.count(2))
    name = next(name for name in names if name not in taken)
    taken.add(name)
    return name


def values_of(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yields the inputs, initializers and node outputs of a graph, but not of its subgraphs."""
    yield from (*graph.inputs, *graph.initializers.values())
    yield from (value for node in graph for value in node.outputs)


def fresh_name(model: ir.Model, base: str) -> str:
    """Returns `base` if no value of the model has this name, else the first free name of `base_2`, `base_3`, ..."""
    return fresh_names(model, [base])[0]


def fresh_names(model: ir.Model, bases: Iterable[str]) -> list[str]:
    """Returns a free name for each base, like :func:`fresh_name`; the names are distinct."""
    taken = {value.name for graph in model.graphs() for value in values_of(graph)}
    names = []
    for base in bases:
        names.append(numbered(base, taken) if base in taken else base)
        taken.add(names[-1])
    return names
