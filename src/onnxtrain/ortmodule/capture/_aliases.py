"""Results that share memory, with an input or with each other: views that PyTorch takes, as in eager PyTorch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from onnxtrain.ortmodule._torch import set_grad_enabled
from onnxtrain.ortmodule.capture._fakes import changes, name_of, node_memory

_RESHAPING = frozenset({
    "as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_",
    "unsqueeze_",
})  # fmt: skip


@dataclass(frozen=True)
class Views:
    """The outputs of a graph that PyTorch takes as views, from its inputs or from another output, at no cost.

    A result of ONNX Runtime would have the right values and memory of its own: what the caller then writes into it
    would not reach the input, and a buffer that forward adds to in place would become another tensor.

    Attributes:
        graph: takes the inputs of the graph, then the outputs `bases`; returns the views.
        outputs: per view the index of its output, and whether it requires a gradient.
        bases: indices of the outputs of which views are taken.
    """

    graph: fx.GraphModule
    outputs: dict[int, bool]
    bases: tuple[int, ...]


def split_views(graph_module: fx.GraphModule) -> Views | None:
    """Takes such outputs out of the graph, leaving None in their places; None if there are none.

    The tensor that several results are views of becomes a last output, unless it is one already.

    Raises:
        NotImplementedError: such a tensor, or an input, gets another shape in place.
    """
    _refuse_other_shapes(graph_module)
    output = graph_module.graph.find_nodes(op="output")[0]
    results = list(output.args[0])
    maker = _ViewsGraph(graph_module)
    inputs = {node_memory(node) for node in maker.made}
    places: dict[int, list[int]] = {}
    for index, node in enumerate(results):
        if isinstance(node, fx.Node) and (memory := node_memory(node)) is not None:
            places.setdefault(memory, []).append(index)
    bases: list[int] = []
    taken: list[int] = []
    for memory, indices in places.items():
        if memory not in inputs:
            roots = {_root(results[index]) for index in indices}
            if len(roots) > 1 or (len(indices) == 1 and not maker.is_ungraded(results[indices[0]])):
                continue
            root = roots.pop()
            place = results.index(root) if root in results else len(results)
            results += [root] if place == len(results) else []
            bases.append(place)
            is_base = maker.add_base(root)
            indices = [index for index in indices if index != place or not is_base]
        taken += [index for index in indices if _root(results[index]) in maker.made]
    if not taken:
        return None
    nodes = [results[index] for index in taken]
    views = maker.finish(nodes)
    for index in taken:
        if index not in bases:
            results[index] = None
    output.args = (tuple(results),)
    graph_module.recompile()
    flags = [node.meta["example_value"].requires_grad for node in nodes]
    return Views(views, dict(zip(taken, flags, strict=True)), tuple(bases))


def _refuse_other_shapes(graph_module: fx.GraphModule) -> None:
    """Raises where an input gets another shape in place, which its caller sees: `torch.atleast_2d(x).t_()`."""
    inputs = {
        id(node.meta["example_value"])
        for node in graph_module.graph.nodes
        if node.op == "placeholder" and node_memory(node) is not None
    }
    for node in graph_module.graph.nodes:
        if name_of(node) in _RESHAPING and id(node.meta.get("example_value")) in inputs:
            raise NotImplementedError("it gives another shape, in place, to an input")


class _ViewsGraph:
    """The graph of the views alone; inputs have been changed already when it runs."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self._module = graph_module
        self._graph = fx.Graph()
        self.made = {
            node: self._graph.node_copy(node) for node in graph_module.graph.find_nodes(op="placeholder")
        }
        self._last = next(reversed(self.made.values()), None)
        self._ungraded = _without_gradient(graph_module) if torch.is_grad_enabled() else frozenset()
        self._reshaped = {
            id(node.meta["example_value"])
            for node in graph_module.graph.nodes
            if name_of(node) in _RESHAPING and node_memory(node) is not None
        }

    def add_base(self, node: fx.Node) -> bool:
        """Takes a result as an input; returns whether views can be taken of it as it is.

        ONNX Runtime's results are contiguous: what is not, in eager PyTorch, is laid out as it is there.
        """
        self._refuse_other_shape(node)
        after = self._last
        with self._graph.inserting_after(after) if after is not None else self._graph.inserting_before():
            made = self._last = self._graph.placeholder(f"base_{node.name}")
        value = node.meta["example_value"]
        contiguous = value.is_contiguous()
        if not contiguous:
            order = sorted(range(value.dim()), key=lambda axis: value.stride()[axis], reverse=True)
            inverse = [order.index(axis) for axis in range(value.dim())]
            made = self._graph.call_method("permute", (made, order))
            made = self._graph.call_method("contiguous", (made,))
            made = self._graph.call_method("permute", (made, inverse))
        self.made[node] = made
        return bool(contiguous)

    def _refuse_other_shape(self, node: fx.Node) -> None:
        if id(node.meta.get("example_value")) in self._reshaped:
            raise NotImplementedError("it gives another shape, in place, to a tensor that has views")

    def is_ungraded(self, node: fx.Node) -> bool:
        """Whether a node is a view, made under no_grad, of what requires a gradient: so does it, and passes none on."""
        return node in self._ungraded and node.meta["example_value"].requires_grad and _root(node) is not node

    def finish(self, nodes: Sequence[fx.Node]) -> fx.GraphModule:
        """Returns the graph with these nodes as its results."""
        self._graph.output(tuple(self._copied(node) for node in nodes))
        return fx.GraphModule(self._module, self._graph)

    def _copied(self, node: fx.Node) -> fx.Node:
        if node not in self.made:
            self._refuse_other_shape(node)
            if node_memory(node) is not None and changes(node):
                base = _base(node)
                assert base is not None
                self.made[node] = self._copied(base)
            else:
                for source in node.all_input_nodes:
                    self._copied(source)
                ungraded = node in self._ungraded
                if ungraded:
                    self._graph.call_function(set_grad_enabled, (False,))
                self.made[node] = self._graph.node_copy(node, self.made.__getitem__)
                if ungraded:
                    self._graph.call_function(set_grad_enabled, (True,))
        return self.made[node]


def _without_gradient(graph_module: fx.GraphModule) -> frozenset[fx.Node]:
    """The nodes inside of `torch.no_grad`."""
    enabled, found = True, []
    for node in graph_module.graph.nodes:
        if node.target is set_grad_enabled:
            enabled = bool(node.args[0])
        elif not enabled:
            found.append(node)
    return frozenset(found)


def _root(node: fx.Node) -> fx.Node:
    """The node that a node comes from by views and by changes in place."""
    while node.op != "placeholder" and (base := _base(node)) is not None:
        node = base
    return node


def _base(node: fx.Node) -> fx.Node | None:
    """The argument whose memory the node's result has."""
    if name_of(node) == "channel_shuffle":  # of one group: a copy, whatever its fake tensor says
        return None
    memory = node_memory(node)
    for source in node.all_input_nodes:
        if node_memory(source) == memory:
            return source
        if node.target is operator.getitem and node_memory(source) is None:  # of a list of views
            return next((far for far in source.all_input_nodes if node_memory(far) == memory), None)
    return None
