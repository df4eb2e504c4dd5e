"""Computes how many nodes a model would have after inlining its functions, without inlining them."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from onnxtrain.runtime import onnx_proto as proto
from onnxtrain.runtime import onnx_wire as wire
from onnxtrain.runtime.external_data import is_ort_format

Key = TypeVar("Key", bound=Hashable)
_Function = tuple[str, str, str]
_NODE_NAMES = (proto.NODE_DOMAIN, proto.NODE_OP_TYPE, proto.NODE_OVERLOAD)

# Maximum number of inlined nodes in addition to ten times the original ones. ONNX Runtime (1.32) takes 20 s for 32,768.
_ALLOWED = 10_000


def inlined_sizes(
    calls: Mapping[Key, Sequence[Key]], sizes: Mapping[Key, int], roots: Iterable[Key]
) -> dict[Key, int]:
    """Returns the number of nodes that each function body would have after inlining all calls in it.

    The number can be exponential: if each of forty functions calls the previous one twice, the last has 2^40 nodes. A
    recursive call counts as one node.

    Args:
        calls: for each function, the functions that it calls, once per call.
        sizes: for each function, the number of nodes of its body, including calls.
        roots: functions to begin with. The result contains these and all that they call, directly or indirectly.
    """
    counts: dict[Key, int] = {}
    entered: set[Key] = set()
    for root in roots:
        if root in entered:
            continue
        entered.add(root)
        # Not recursive, because a chain of calls may be longer than Python's stack.
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
    """Rejects a model whose nested function calls would take ONNX Runtime too long to inline at load time.

    A model that cannot be parsed is not rejected: ONNX Runtime reports the error.

    Args:
        model: path of the model, or its bytes.

    Raises:
        ValueError: after inlining, a function would have far more nodes than all functions in the file together.
        OSError: the file cannot be read.
    """
    if isinstance(model, str):
        # Imported here, because a device may run models that are given as bytes. Memory-mapped, so that weights are not
        # read.
        import mmap

        if not os.path.getsize(model):
            return
        with open(model, "rb") as file:
            model = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if is_ort_format(model):
        return
    try:
        bodies = _bodies(model)
    # Not an error here, because ONNX Runtime, which opens the model next, has a better message.
    except (ValueError, RecursionError):
        return
    calls = {name: [op for op in ops if op in bodies] for name, ops in bodies.items()}
    counts = inlined_sizes(calls, {name: len(ops) for name, ops in bodies.items()}, bodies)
    allowed = _ALLOWED + 10 * sum(len(bodies.get(op, (op,))) for ops in bodies.values() for op in ops)
    largest = max(counts, key=lambda name: counts[name], default=None)
    if largest is not None and counts[largest] > allowed:
        raise ValueError(
            f"the nested calls in {largest[1]!r} would expand to {counts[largest]:,} nodes, more than the "
            f"limit of {allowed:,} for a file of this size"
        )


def _bodies(model: wire.Bytes) -> dict[_Function, list[_Function]]:
    """Maps each function of a model to the ops of its nodes and of the nodes in its subgraphs."""
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
    """Yields (domain, op type, overload) for a node and for each node in its subgraphs."""
    # In one pass over the fields: functions of a training model have hundreds of nodes.
    last: dict[int, bytes] = {}
    attributes = []
    for field in wire.parse(node):
        if field.number == proto.NODE_ATTRIBUTE:
            attributes.append(field.payload)
        elif field.number in _NODE_NAMES:
            last[field.number] = bytes(field.payload)
    domain, op_type, overload = (last.get(number, b"").decode() for number in _NODE_NAMES)
    yield domain, op_type, overload
    for attribute in attributes:
        for field in wire.parse(attribute):
            if field.number in (proto.ATTRIBUTE_GRAPH, proto.ATTRIBUTE_GRAPHS):
                for inner in wire.messages(field.payload, proto.GRAPH_NODE):
                    yield from _ops(inner)
