"""Counts the nodes that a model's functions become once they are inlined, without inlining them."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from onnxtrain.runtime import onnx_proto as proto
from onnxtrain.runtime import onnx_wire as wire
from onnxtrain.runtime.external_data import is_ort_format

Key = TypeVar("Key", bound=Hashable)
_Function = tuple[str, str, str]

# Nodes that functions may become beyond ten times those of their bodies. ONNX Runtime (1.32) takes 20 s for 32,768.
_ALLOWED = 10_000


def inlined_sizes(
    calls: Mapping[Key, Sequence[Key]], sizes: Mapping[Key, int], roots: Iterable[Key]
) -> dict[Key, int]:
    """Returns the number of nodes of each body that is reached, once all calls in it are inlined.

    Forty functions that call the one before them twice each are 2^40 nodes. A call of a function that is being counted,
    which calls itself then, counts as one node.

    Args:
        calls: per body the functions that it calls, once for each call.
        sizes: per body its number of nodes, calls included.
        roots: bodies to begin with.
    """
    counts: dict[Key, int] = {}
    entered: set[Key] = set()
    for root in roots:
        if root in entered:
            continue
        entered.add(root)
        # Not recursive: a chain of calls may be longer than Python's stack.
        path = [(root, iter(calls[root]))]
        while path:
            key, rest = path[-1]
            callee = next((callee for callee in rest if callee not in entered), None)
            if callee is not None:
                entered.add(callee)
                path.append((callee, iter(calls[callee])))
                continue
            path.pop()
            counts[key] = sizes[key] + sum(counts.get(callee, 1) - 1 for callee in calls[key])
    return counts


def check_function_calls(model: str | wire.Bytes) -> None:
    """Checks that ONNX Runtime, which inlines functions when it loads a model, ends.

    Args:
        model: path of the model, or its bytes.

    Raises:
        ValueError: the functions become far more nodes than there are in the file.
        OSError: the file cannot be read.
    """
    if isinstance(model, str):
        # Imported here, as a device may run models that are given as bytes. Mapped, so that weights are not read.
        import mmap

        if not os.path.getsize(model):
            return
        with open(model, "rb") as file:
            model = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if is_ort_format(model):
        return
    try:
        bodies = _bodies(model)
    # Not an error yet: ONNX Runtime, which opens the model next, says more about it.
    except (ValueError, RecursionError):
        return
    calls = {name: [op for op in ops if op in bodies] for name, ops in bodies.items()}
    counts = inlined_sizes(calls, {name: len(ops) for name, ops in bodies.items()}, bodies)
    allowed = _ALLOWED + 10 * sum(len(bodies.get(op, (op,))) for ops in bodies.values() for op in ops)
    largest = max(counts, key=lambda name: counts[name], default=None)
    if largest is not None and counts[largest] > allowed:
        raise ValueError(
            f"its functions call one another so often that {largest[1]!r} alone would be {counts[largest]:,} nodes, "
            f"and {allowed:,} are allowed for a file of this size"
        )


def _bodies(model: wire.Bytes) -> dict[_Function, list[_Function]]:
    """Reads the functions of a model; returns the ops of the nodes of each, those in subgraphs included."""
    bodies = {}
    for function in wire.messages(model, proto.MODEL_FUNCTION):
        name = (
            wire.string(function, proto.FUNCTION_DOMAIN),
            wire.string(function, proto.FUNCTION_NAME),
            wire.string(function, proto.FUNCTION_OVERLOAD),
        )
        bodies[name] = [op for node in wire.messages(function, proto.FUNCTION_NODE) for op in _ops(node)]
    return bodies


def _ops(node: wire.Bytes) -> Iterator[_Function]:
    """Yields domain, name and overload of the op of a node, and of those in its subgraphs."""
    yield (
        wire.string(node, proto.NODE_DOMAIN),
        wire.string(node, proto.NODE_OP_TYPE),
        wire.string(node, proto.NODE_OVERLOAD),
    )
    for attribute in wire.messages(node, proto.NODE_ATTRIBUTE):
        for number in (proto.ATTRIBUTE_GRAPH, proto.ATTRIBUTE_GRAPHS):
            for graph in wire.messages(attribute, number):
                for inner in wire.messages(graph, proto.GRAPH_NODE):
                    yield from _ops(inner)
