"""Results that share memory, with an input or with each other: views that PyTorch takes, as in eager PyTorch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from onnxtrain.ortmodule._torch import (
    compute_overlapping_tensors,
    is_functorch_wrapped_tensor,
    is_of_module,
    set_grad_enabled,
)

_IN_PLACE = frozenset(
    function
    for name, function in vars(operator).items()
    if name == "setitem" or (name.startswith("__i") and f"__{name[3:]}" in vars(operator))
)
"""`operator.iadd`, `operator.setitem` and the like."""

_RESHAPING = frozenset({
    "as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_",
    "unsqueeze_",
})  # fmt: skip


class Aliases:
    """The outputs of a graph that PyTorch takes from its inputs or from another output, at no cost.

    A result of ONNX Runtime would have the right values and memory of its own: what the caller then writes into it
    would not reach the input, and a buffer that forward adds to in place would become another tensor.
    """

    def __init__(
        self, views: fx.GraphModule, outputs: Sequence[tuple[int, bool]], bases: Sequence[int], count: int
    ) -> None:
        self._views = views
        self._outputs = tuple(outputs)
        self._bases = tuple(bases)
        self._count = count

    def fill(self, results: Sequence[Any], args: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the results with the views of `args`, and of other results, in their places."""
        filled = list(results[: self._count])
        views = self._views.forward(*args, *(results[index] for index in self._bases))
        for (index, requires_grad), view in zip(self._outputs, views, strict=True):
            filled[index] = view if requires_grad or not view.requires_grad else view.detach()
        return tuple(filled)


def split_aliases(graph_module: fx.GraphModule) -> Aliases | None:
    """Takes such outputs out of the graph, leaving None in their places; None if there are none.

    The tensor that several results are views of becomes a last output, unless it is one already.

    Raises:
        NotImplementedError: such a tensor, or an input, gets another shape in place.
    """
    _refuse_other_shapes(graph_module)
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    results = list(output.args[0])
    maker = _ViewsGraph(graph_module)
    inputs = {_memory(node) for node in maker.made}
    count = len(results)
    places: dict[int, list[int]] = {}
    for index, node in enumerate(results):
        if isinstance(node, fx.Node) and (memory := _memory(node)) is not None:
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
    return Aliases(views, list(zip(taken, flags, strict=True)), bases, count)


def _refuse_other_shapes(graph_module: fx.GraphModule) -> None:
    """Raises where an input gets another shape in place, which its caller sees: `torch.atleast_2d(x).t_()`."""
    inputs = {
        id(node.meta["example_value"])
        for node in graph_module.graph.nodes
        if node.op == "placeholder" and _memory(node) is not None
    }
    for node in graph_module.graph.nodes:
        if _name(node) in _RESHAPING and id(node.meta.get("example_value")) in inputs:
            raise NotImplementedError("it gives another shape, in place, to an input")


class _ViewsGraph:
    """The graph of the views alone; inputs have been changed already when it runs."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self._module = graph_module
        self._graph = fx.Graph()
        self.made = {
            node: self._graph.node_copy(node) for node in graph_module.graph.nodes if node.op == "placeholder"
        }
        self._last = next(reversed(self.made.values()), None)
        self._ungraded = _without_gradient(graph_module) if torch.is_grad_enabled() else frozenset()
        self._reshaped = {
            id(node.meta["example_value"])
            for node in graph_module.graph.nodes
            if _name(node) in _RESHAPING and _memory(node) is not None
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
            if _memory(node) is not None and changes(node):
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


def _memory(node: fx.Node) -> int | None:
    """What tells the memory of a tensor from that of others."""
    value = node.meta.get("example_value")
    if (
        not isinstance(value, torch.Tensor)
        or value.layout != torch.strided
        or is_functorch_wrapped_tensor(value)
    ):
        return None
    return memory_of(value)


def _root(node: fx.Node) -> fx.Node:
    """The node that a node comes from by views and by changes in place."""
    while node.op != "placeholder" and (base := _base(node)) is not None:
        node = base
    return node


def _base(node: fx.Node) -> fx.Node | None:
    """The argument whose memory the node's result has."""
    if _name(node) == "channel_shuffle":  # of one group: a copy, whatever its fake tensor says
        return None
    memory = _memory(node)
    for source in node.all_input_nodes:
        if _memory(source) == memory:
            return source
        if node.target is operator.getitem and _memory(source) is None:  # of a list of views
            return next((far for far in source.all_input_nodes if _memory(far) == memory), None)
    return None


def changes(node: fx.Node) -> bool:
    """Returns whether a node changes its first argument, as `mul_` and `operator.setitem` do."""
    if node.op == "call_function" and node.target in _IN_PLACE:
        return True
    if node.kwargs.get("inplace") is True or "out" in node.kwargs:
        return True
    name = _name(node)
    return name.endswith("_") and not name.endswith("__")


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


class Overlaps:
    """Whether inputs of a graph share memory with one that the graph writes to.

    Parameters and buffers are compared when the graph is captured, arguments of the call in each call.

    Attributes:
        noticed: indices of the inputs that the graph writes to in a way that autograd sees: not through `.data`.
        looked_for: whether any two could overlap.

    Raises:
        NotImplementedError: they do when it is captured, or an input that is written to shares memory with itself.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        nodes = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        self._tensors = [place for place, node in enumerate(nodes) if _memory(node) is not None]
        self._written = [place for place in self._tensors if _is_written(nodes[place])]
        self.noticed = frozenset(self._written)
        self._arguments = [place for place in self._tensors if not is_of_module(nodes[place])]
        values = [node.meta.get("example_value") for node in nodes]
        if self._overlap(values, memory_of):
            raise NotImplementedError("it writes to an input that shares its memory with another one")
        if any(_repeats(values[place]) for place in self._written):
            raise NotImplementedError("it writes to an input of which several elements are one in memory")
        if len(self._tensors) < 2 or not self._arguments:
            self._written = []
        self.looked_for = bool(self._written)

    def found(self, args: Sequence[Any]) -> bool:
        """Whether these arguments of the graph overlap where they may not."""
        ranges = [(place, *_range(args[place])) for place in self._arguments]
        for place in self._written:
            address = args[place].data_ptr()
            for argument, start, end in ranges:
                if start <= address < end and argument != place:
                    return self._overlap(args, _address_of)
        return False

    def _overlap(self, args: Sequence[Any], memory: Callable[[torch.Tensor], int]) -> bool:
        sharing: dict[int, list[int]] = {memory(args[place]): [] for place in self._written}
        for place in self._tensors if sharing else ():
            sharing.get(memory(args[place]), []).append(place)
        for places in sharing.values():
            values = [args[place] for place in places]
            numbers = [number for v in values for number in (*v.shape, *v.stride(), v.storage_offset())]
            symbolic = any(isinstance(number, torch.SymInt) for number in numbers)
            overlapping = compute_overlapping_tensors(values, symbolic=symbolic) if len(values) > 1 else ()
            if any(places[index] in self._written for index in overlapping):
                return True
        return False


def _repeats(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor share their memory, as those of an expanded one do."""
    return any(
        isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size <= 1)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def memory_of(tensor: torch.Tensor) -> int:
    """Returns what tells the memory of a tensor, fake ones among them, from that of others."""
    memory: int = tensor.untyped_storage()._cdata
    return memory


def _address_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return start, start + storage.nbytes()


def _is_written(placeholder: fx.Node) -> bool:
    value = placeholder.meta["example_value"]
    return bool(not value.is_inference() and value._version > 0)
