"""Generates names that are unique within a graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

import onnx_ir as ir


class Names:
    """A pool of names in use.

    The pool remembers the last suffix of each name. Otherwise, naming the n-th `Mul` would take n attempts.

    Args:
        names: the names in use; read lazily, at the first request.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = names
        self._counts: dict[str, int] = {}

    @cached_property
    def _taken(self) -> set[str]:
        return set(self._names)

    def unique(self, preferred: str) -> str:
        """Returns the first free name among `preferred`, `preferred_1`, `preferred_2`, ... and reserves it."""
        name, count = preferred, self._counts.get(preferred, 0)
        while name in self._taken:
            count += 1
            name = f"{preferred}_{count}"
        self._counts[preferred] = count
        self._taken.add(name)
        return name


def all_names(graph: ir.Graph) -> Iterator[str]:
    """Yields the names of all nodes and values in a graph and in its subgraphs."""
    # ONNX forbids a subgraph to reuse the name of a value in an enclosing graph.
    for value in (*graph.inputs, *graph.initializers.values()):
        yield value.name or ""
    for node in graph.all_nodes():
        yield node.name or ""
        for value in node.outputs:
            yield value.name or ""
        for attribute in node.attributes.values():
            for value in inputs_of_subgraph(attribute):
                yield value.name or ""


def inputs_of_subgraph(attribute: ir.Attr) -> Iterator[ir.Value]:
    """Yields the inputs and initializers of the subgraph in `attribute`; yields nothing for other attributes."""
    if not attribute.is_ref() and attribute.type == ir.AttributeType.GRAPH:
        subgraph = attribute.as_graph()
        yield from subgraph.inputs
        yield from subgraph.initializers.values()
