"""Outputs that share the memory of an input: the input itself, or a view of it, as in eager PyTorch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

__all__ = ["Aliases", "split_aliases"]

_IN_PLACE = frozenset(getattr(operator, name) for name in dir(operator) if name.startswith("i"))


class Aliases:
    """The outputs of a graph that PyTorch takes from its inputs, at no cost.

    A result of ONNX Runtime would have the right values and memory of its own: what the caller then writes into it
    would not reach the input, and a buffer that forward adds to in place would become another tensor.
    """

    def __init__(self, views: fx.GraphModule, outputs: Sequence[tuple[int, bool]]) -> None:
        self._views = views
        self._outputs = tuple(outputs)

    def fill(self, results: Sequence[Any], args: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the results with the views of `args` in their places."""
        filled = list(results)
        for (index, requires_grad), view in zip(self._outputs, self._views.forward(*args), strict=True):
            filled[index] = view if requires_grad or not view.requires_grad else view.detach()
        return tuple(filled)


def split_aliases(graph_module: fx.GraphModule) -> Aliases | None:
    """Takes such outputs out of the graph, leaving None in their places; None if there are none."""
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    results = list(output.args[0])
    views = fx.Graph()
    made = {node: views.node_copy(node) for node in graph_module.graph.nodes if node.op == "placeholder"}
    inputs = {_memory(node) for node in made}
    taken: list[tuple[int, bool]] = []
    values: list[fx.Node] = []
    for index, node in enumerate(results):
        if not isinstance(node, fx.Node) or (memory := _memory(node)) is None or memory not in inputs:
            continue
        if not _is_view(node):
            continue
        values.append(_copied(node, views, made))
        taken.append((index, node.meta["example_value"].requires_grad))
        results[index] = None
    if not taken:
        return None
    views.output(tuple(values))
    output.args = (tuple(results),)
    graph_module.recompile()
    return Aliases(fx.GraphModule(graph_module, views), taken)


def _memory(node: fx.Node) -> int | None:
    """What tells the memory of a tensor from that of others."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    memory: int = value.untyped_storage()._cdata
    return memory


def _is_view(node: fx.Node) -> bool:
    """Whether a node is an input, or comes from one by views and by changes in place that carry no gradient."""
    while node.op != "placeholder":
        base = _base(node)
        if base is None or (_changes(node) and node.meta["example_value"].requires_grad):
            return False
        node = base
    return True


def _base(node: fx.Node) -> fx.Node | None:
    """The argument whose memory the node's result has."""
    first = node.args[0] if node.args else None
    if node.target is operator.getitem and isinstance(first, fx.Node) and first.args:  # of a list of views
        first = first if _memory(first) is not None else first.args[0]
    return first if isinstance(first, fx.Node) and _memory(first) == _memory(node) else None


def _changes(node: fx.Node) -> bool:
    """Whether a node changes its first argument, and returns it."""
    if node.op == "call_function" and node.target in _IN_PLACE:
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _copied(node: fx.Node, graph: fx.Graph, made: dict[fx.Node, fx.Node]) -> fx.Node:
    """The node in the other graph; inputs have been changed already when that graph runs."""
    if node not in made:
        if _memory(node) is not None and _changes(node):
            made[node] = _copied(node.args[0], graph, made)  # type: ignore[arg-type]
        else:
            for source in node.all_input_nodes:
                _copied(source, graph, made)
            made[node] = graph.node_copy(node, made.__getitem__)
    return made[node]
