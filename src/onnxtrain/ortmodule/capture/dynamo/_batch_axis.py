"""Captures functions with a symbolic batch size, so that one capture serves all batch sizes."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from onnxtrain.ortmodule._torch import DYNAMIC_AXES, MARKED_AXES, pytree
from onnxtrain.ortmodule.capture._nodes import example_values, is_plain, is_symbolic


class _MarkedTensors(threading.local):
    """The ids of the tensors whose batch axis this thread has marked as dynamic."""

    ids: frozenset[int] = frozenset()


_marked_tensors = _MarkedTensors()


@contextlib.contextmanager
def symbolic_batch(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Context manager that makes Dynamo capture with a symbolic batch size.

    The batch size is the most frequent size, above 1, of the first axes of the tensor arguments. If the function needs
    it as a number, as in `range(len(x))`, Dynamo specializes the graph to the number.

    Args:
        arguments: the local variables of the captured function before it runs, by name.
    """
    tensors = {id(leaf): leaf for leaf in _leaves(dict(arguments)) if _may_have_batch(leaf)}
    sizes = Counter(tensor.shape[0] for tensor in tensors.values())
    batch = sizes.most_common(1)[0][0] if sizes else None
    # Axes that the user has marked are left alone: such a graph is compiled once, for all sizes.
    marked = [
        t for t in tensors.values() if t.shape[0] == batch and not any(hasattr(t, a) for a in MARKED_AXES)
    ]
    for tensor in marked:
        setattr(tensor, DYNAMIC_AXES, {0})
    before = _marked_tensors.ids
    _marked_tensors.ids = frozenset(map(id, marked))
    try:
        yield
    finally:
        _marked_tensors.ids = before
        for tensor in marked:
            vars(tensor).pop(DYNAMIC_AXES, None)


def _leaves(value: Any) -> list[Any]:
    """Returns the leaves of nested containers, visiting each container once, because a container may contain itself."""
    # The values are kept alive, so that no new object reuses an id.
    seen: dict[int, Any] = {}

    def is_visited(part: Any) -> bool:
        if id(part) in seen:
            return True
        seen[id(part)] = part
        return False

    leaves: list[Any] = pytree.tree_leaves(value, is_leaf=is_visited)
    return leaves


def _may_have_batch(value: Any) -> bool:
    """True if a value is a plain tensor whose first axis has more than one element."""
    # Dynamo specializes sizes of 1, because they decide how a tensor is broadcast.
    if type(value) is not torch.Tensor or not is_plain(value) or value.is_conj() or value.is_neg():
        return False
    return value.dim() > 0 and value.shape[0] > 1


def has_symbolic_batch(graph_module: fx.GraphModule) -> bool:
    """True if a graph that is being captured has symbolic sizes because of :func:`symbolic_batch`."""
    return bool(_marked_tensors.ids) and any(map(is_symbolic, example_values(graph_module)))


def batch_symbols(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> frozenset[Any]:
    """Returns the symbols of the batch size; an empty set if the graph has none, or also has other symbols.

    Args:
        graph_module: a Dynamo graph that is being captured.
        inputs: the inputs that Dynamo passes to its backend.
    """
    marked = _marked_tensors.ids
    symbols: set[Any] = set()
    numbers: set[Any] = set()
    for value, given in zip(example_values(graph_module), inputs, strict=False):
        if not is_symbolic(value):
            continue
        # Dynamo makes other axes symbolic after their size has changed. Such a graph will see many sizes.
        if isinstance(value, torch.Tensor) and (
            id(given) not in marked or any(map(is_symbolic, value.shape[1:]))
        ):
            return frozenset()
        (symbols if isinstance(value, torch.Tensor) else numbers).update(free_symbols(value))
    return frozenset(symbols) if numbers <= symbols else frozenset()
