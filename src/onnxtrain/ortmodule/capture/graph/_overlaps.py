"""Detects memory under several names, or several elements, that a captured graph writes to.

ONNX Runtime computes the new value into separate memory. It is copied back after the graph has run, so for a second
input with the same memory, the graph would read the old value. Eager PyTorch reads the new value.

A write to an expanded tensor, e.g. `x.expand(3, -1).fill_(1)`, is not kept as a write to `x`: functionalization
(PyTorch 2.13) adds up the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from onnxtrain.ortmodule._torch import compute_overlapping_tensors, is_of_module
from onnxtrain.ortmodule.capture._nodes import memory_of, node_memory, writes_in_place


class Overlaps:
    """Detects inputs that overlap an input that the graph writes to.

    The constructor checks the inputs of the captured call; :meth:`found` checks the arguments of a later call.

    Args:
        graph_module: a Dynamo graph.

    Attributes:
        noticed: indices of the inputs whose version counters the graph's writes increment, e.g. {0}. Writes through
            `.data` don't increment them.
        looked_for: True if each call must be checked, because the graph writes to an input, has several tensor inputs,
            and at least one of them is an argument, i.e. neither a parameter nor a buffer.

    Raises:
        NotImplementedError: an input that the graph writes to overlaps another input, or a tensor that it writes to
            overlaps itself.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        nodes = graph_module.graph.find_nodes(op="placeholder")
        self._tensors = [place for place, node in enumerate(nodes) if node_memory(node) is not None]
        self.noticed = frozenset(place for place in self._tensors if _is_written(nodes[place]))
        # A tensor and its `.data` have the same memory, and different version counters.
        written = {node_memory(node) for node in graph_module.graph.nodes if _is_written(node)}
        self._written = [place for place in self._tensors if node_memory(nodes[place]) in written]
        self._arguments = [place for place in self._tensors if not is_of_module(nodes[place])]
        values = [node.meta.get("example_value") for node in nodes]
        if self._overlap(values, memory_of):
            raise NotImplementedError(
                "the graph writes to an input that shares its memory with another input: clone one of them"
            )
        if any(_overlaps_itself(values[place]) for place in self._written) or any(
            map(_writes_to_expanded, graph_module.graph.nodes)
        ):
            raise NotImplementedError(
                "the graph writes to a tensor whose elements share memory with each other, e.g. after expand: clone it"
            )
        if len(self._tensors) < 2 or not self._arguments:
            self._written = []
        self.looked_for = bool(self._written)

    def found(self, args: Sequence[Any]) -> bool:
        """True if an argument of this call overlaps an input that the graph writes to."""
        # A cheap test first: only tensors in overlapping storages are compared element by element.
        ranges = [(place, *_memory_range(args[place])) for place in self._arguments]
        for place in self._written:
            address = args[place].data_ptr()
            for argument, start, end in ranges:
                if start <= address < end and argument != place:
                    return self._overlap(args, _address_of)
        return False

    def _overlap(self, args: Sequence[Any], memory: Callable[[torch.Tensor], int]) -> bool:
        """True if an input that the graph writes to overlaps another input.

        Args:
            args: the inputs.
            memory: returns an identifier of a tensor's storage.
        """
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


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """True if several elements of a tensor share one memory location, e.g. after `x.expand(3, -1)`."""
    return any(
        isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size <= 1)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _writes_to_expanded(node: fx.Node) -> bool:
    """True if a node writes to a tensor, or to a view of a tensor, that overlaps itself."""
    if not writes_in_place(node):
        return False
    target = node.kwargs.get("out") or next(iter(node.args), None)
    memory = node_memory(target) if isinstance(target, fx.Node) else None
    while memory is not None and isinstance(target, fx.Node) and node_memory(target) == memory:
        if _overlaps_itself(target.meta["example_value"]):
            return True
        target = next(iter(target.args), None)
    return False


def _address_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _memory_range(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return start, start + storage.nbytes()


def _is_written(node: fx.Node) -> bool:
    """True if the graph writes to a node's result, according to the version counter of Dynamo's fake tensor."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and not value.is_inference() and value._version > 0
