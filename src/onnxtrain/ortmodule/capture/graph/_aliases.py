"""Moves output views out of a captured graph: PyTorch creates the outputs that alias inputs or other outputs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from onnxtrain.ortmodule._torch import set_grad_enabled
from onnxtrain.ortmodule.capture._nodes import (
    memory_of,
    name_of,
    node_memory,
    plain_tensors_in,
    writes_in_place,
)

# Methods that change the shape or strides of a tensor in place. Replacing it with a view has a different effect.
_RESHAPING_OPS = frozenset({
    "as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_",
    "unsqueeze_",
})  # fmt: skip


# Functions that read only the metadata (shape, strides, offset) of an argument that their result does not alias.
_METADATA_READS = frozenset({
    "dim", "expand_as", "getattr", "numel", "reshape_as", "size", "storage_offset", "stride", "sym_size", "view_as",
})  # fmt: skip


@dataclass(frozen=True)
class Views:
    """The outputs of a captured graph that are views of its inputs or of another output.

    ONNX Runtime would compute these outputs into new memory. Then `model(x)[0].zero_()` would not change `x`, as it
    does in eager PyTorch, and a buffer that forward both writes to and returns would come back as a different tensor.

    Attributes:
        graph: takes the inputs of the captured graph, then its outputs `bases`; returns the views.
        outputs: maps the index of each output that is a view to a flag, True if the view requires a gradient.
        bases: indices of the outputs that `graph` takes: the bases of views, and values that a view's offset or size
            depends on, e.g. `i` in `x[i.item()]`.
    """

    graph: fx.GraphModule
    outputs: dict[int, bool]
    bases: tuple[int, ...]


def split_views(graph_module: fx.GraphModule) -> Views | None:
    """Removes output views from a graph, in place: the graph returns None for them.

    If several outputs share memory, their common base is appended to the outputs, unless it is an output already. An
    output that is both a view and a base is still returned.

    Returns:
        The views, or None if no output is a view.

    Raises:
        NotImplementedError: the graph changes the shape of an input, or of a tensor that has views, in place.
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
    view_indices: list[int] = []
    for memory, indices in places.items():
        if memory not in inputs:
            roots = {_allocating_node(results[index]) for index in indices}
            # A single output with this memory needs no base. An exception is a view that was created under `no_grad`:
            # it requires a gradient but propagates none, which only PyTorch's own view reproduces.
            if len(roots) > 1 or (len(indices) == 1 and not maker.is_no_grad_view(results[indices[0]])):
                continue
            root = roots.pop()
            place = results.index(root) if root in results else len(results)
            results += [root] if place == len(results) else []
            bases.append(place)
            is_base = maker.add_base(root)
            indices = [index for index in indices if index != place or not is_base]
        view_indices += [index for index in indices if _allocating_node(results[index]) in maker.made]
    if not view_indices:
        return None
    nodes = [results[index] for index in view_indices]
    views = maker.finish(nodes)
    for node in maker.values:
        bases.append(len(results))
        results.append(node)
    for index in view_indices:
        if index not in bases:
            results[index] = None
    output.args = (tuple(results),)
    graph_module.recompile()
    flags = [node.meta["example_value"].requires_grad for node in nodes]
    return Views(views, dict(zip(view_indices, flags, strict=True)), tuple(bases))


def _refuse_other_shapes(graph_module: fx.GraphModule) -> None:
    """Raises NotImplementedError if the graph changes the shape of an input in place, e.g. `x.t_()`.

    In eager PyTorch, the caller's tensor would change shape.
    """
    inputs = {
        id(node.meta["example_value"])
        for node in graph_module.graph.nodes
        if node.op == "placeholder" and node_memory(node) is not None
    }
    for node in graph_module.graph.nodes:
        if name_of(node) in _RESHAPING_OPS and id(node.meta.get("example_value")) in inputs:
            raise NotImplementedError(
                f"the graph changes the shape of an input in place ({name_of(node)}): change the shape of a copy"
            )


class _ViewsGraph:
    """Builds `Views.graph`, which runs after the captured graph, when all writes to inputs are done.

    Args:
        graph_module: the captured graph.

    Attributes:
        made: maps nodes of the captured graph to their copies in the new graph.
        values: nodes of the captured graph whose values the new graph takes as inputs, after the bases.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self._module = graph_module
        self._graph = fx.Graph()
        self.made = {
            node: self._graph.node_copy(node) for node in graph_module.graph.find_nodes(op="placeholder")
        }
        self.values: list[fx.Node] = []
        self._last = next(reversed(self.made.values()), None)
        self._ungraded = _without_gradient(graph_module) if torch.is_grad_enabled() else frozenset()
        self._reshaped = {
            id(node.meta["example_value"])
            for node in graph_module.graph.nodes
            if name_of(node) in _RESHAPING_OPS and node_memory(node) is not None
        }

    def add_base(self, node: fx.Node) -> bool:
        """Adds an input for a base of views, which is an output of the captured graph.

        ONNX Runtime's results are contiguous. If the base is not contiguous in eager PyTorch, the new graph first
        copies it to the eager memory order, because its views depend on that order.

        Returns:
            True if the base is contiguous in eager PyTorch, and so is used without a copy.
        """
        self._refuse_other_shape(node)
        made = self._placeholder(node)
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

    def _placeholder(self, node: fx.Node) -> fx.Node:
        """Adds an input for the value of a node of the captured graph; returns its placeholder."""
        after = self._last
        with self._graph.inserting_after(after) if after is not None else self._graph.inserting_before():
            self._last = self._graph.placeholder(f"base_{node.name}")
        return self._last

    def _refuse_other_shape(self, node: fx.Node) -> None:
        """Raises NotImplementedError if the captured graph changes the shape of a node's tensor in place."""
        if id(node.meta.get("example_value")) in self._reshaped:
            raise NotImplementedError(
                "the graph changes, in place, the shape of a tensor that has views: change the shape of a copy"
            )

    def is_no_grad_view(self, node: fx.Node) -> bool:
        """True if a node is a view that was created under `no_grad` and requires a gradient."""
        return (
            node in self._ungraded
            and node.meta["example_value"].requires_grad
            and _allocating_node(node) is not node
        )

    def finish(self, nodes: Sequence[fx.Node]) -> fx.GraphModule:
        """Adds the views to the new graph, makes them its outputs, and returns the graph.

        Args:
            nodes: the nodes of the captured graph that are views.
        """
        self._graph.output(tuple(self._copied(node) for node in nodes))
        return fx.GraphModule(self._module, self._graph)

    def _copied(self, node: fx.Node) -> fx.Node:
        """Returns the copy of a node in the new graph; adds the copy and its dependencies if they are missing."""
        if node not in self.made:
            self._refuse_other_shape(node)
            # The captured graph has already performed the write. An in-place node returns the tensor it writes to.
            if node_memory(node) is not None and writes_in_place(node):
                base = _aliased_argument(node)
                assert base is not None
                self.made[node] = self._copied(base)
            # A computed tensor whose shape a view uses, e.g. `x.view_as(dropout)`. Recomputing it would draw new random
            # numbers.
            elif node_memory(node) is not None and _aliased_argument(node) is None:
                self.made[node] = self._value(node)
            else:
                sources = {
                    source: self._value(_snapshot(source, node))
                    if _reads_data(node, source)
                    else self._copied(source)
                    for source in node.all_input_nodes
                }
                ungraded = node in self._ungraded
                if ungraded:
                    self._graph.call_function(set_grad_enabled, (False,))
                self.made[node] = self._graph.node_copy(node, sources.__getitem__)
                if ungraded:
                    self._graph.call_function(set_grad_enabled, (True,))
        return self.made[node]

    def _value(self, node: fx.Node) -> fx.Node:
        """Makes the value of a node of the captured graph an input of the new graph; returns the new placeholder."""
        self.values.append(node)
        return self._placeholder(node)


def _reads_data(node: fx.Node, source: fx.Node) -> bool:
    """True if `node` reads the elements of `source`, e.g. `source.item()`, and its result does not alias `source`."""
    memory = node_memory(source)
    if memory is None or name_of(node) in _METADATA_READS:
        return False
    return all(memory_of(tensor) != memory for tensor in plain_tensors_in(node.meta.get("example_value")))


def _snapshot(source: fx.Node, reader: fx.Node) -> fx.Node:
    """Inserts a copy of `source` before `reader` in the captured graph, because the graph may write to `source` later.

    Returns:
        The node of the copy.
    """
    fake = source.meta["example_value"]
    with source.graph.inserting_before(reader):
        # The offset of a view has no gradient.
        detached = source.graph.call_method("detach", (source,))
        copied = source.graph.call_method("clone", (detached,))
    detached.meta["example_value"] = fake.detach()
    copied.meta["example_value"] = detached.meta["example_value"].clone()
    return copied


def _without_gradient(graph_module: fx.GraphModule) -> frozenset[fx.Node]:
    """Returns the nodes inside `torch.no_grad` blocks."""
    enabled, ungraded = True, []
    for node in graph_module.graph.nodes:
        if node.target is set_grad_enabled:
            enabled = bool(node.args[0])
        elif not enabled:
            ungraded.append(node)
    return frozenset(ungraded)


def _allocating_node(node: fx.Node) -> fx.Node:
    """Returns the node that allocated the memory of a node's result.

    It is found by following views and in-place writes backward.
    """
    while node.op != "placeholder" and (base := _aliased_argument(node)) is not None:
        node = base
    return node


def _aliased_argument(node: fx.Node) -> fx.Node | None:
    """Returns the argument that the node's result aliases, or None."""
    # With one group, eager PyTorch (2.13) returns a copy, but the fake tensor aliases the argument.
    if name_of(node) == "channel_shuffle":
        return None
    memory = node_memory(node)
    for source in node.all_input_nodes:
        if node_memory(source) == memory:
            return source
        # An element of a list of views, e.g. `x.chunk(2)[0]`.
        if node.target is operator.getitem and node_memory(source) is None:
            return next((far for far in source.all_input_nodes if node_memory(far) == memory), None)
    return None
