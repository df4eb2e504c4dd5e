"""Looks up values of a graph and their static dimensions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import onnx_ir as ir


def static_dims(value: ir.Value) -> tuple[int | None, ...] | None:
    """Returns the dimensions of `value` with None for symbolic ones, e.g. (None, 3) for [batch, 3].

    Returns None if the rank is unknown.
    """
    if value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else None for dim in value.shape)


def find_value(graph: ir.Graph, name: str) -> ir.Value | None:
    """Returns the graph input, initializer or node output called `name`; None if there is none."""
    return next((value for value in _values(graph) if value.name == name), None)


def computed_names(graph: ir.Graph) -> set[str]:
    """Returns the names of all node outputs."""
    return {str(value.name) for node in graph for value in node.outputs if value.name}


def values_by_name(graph: ir.Graph) -> dict[str, ir.Value]:
    """Returns all inputs, initializers and node outputs by name; faster than `find_value` for many names."""
    return {str(value.name): value for value in _values(graph)}


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    computed = (value for node in graph for value in node.outputs)
    return itertools.chain(graph.inputs, graph.initializers.values(), computed)
