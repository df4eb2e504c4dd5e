"""Parses the protobuf message of an ONNX graph, and removes the nodes that the chosen outputs do not depend on."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onnxtrain.runtime import onnx_proto as proto
from onnxtrain.runtime import onnx_wire as wire
from onnxtrain.runtime.onnx_wire import Bytes


@dataclass
class Node:
    """An encoded NodeProto, from which only the names needed for pruning are parsed.

    Attributes:
        raw: the encoded field of the GraphProto, including its key.
        reads: names of the values that the node and its subgraphs read, e.g. {"x", "fc.weight"}.
        writes: names of its outputs, e.g. ["logits"]; "" for an omitted output.
        calls: (domain, op type) of the node and of the nodes in its subgraphs, e.g. {("", "Gemm")}.
    """

    raw: memoryview
    reads: set[str]
    writes: list[str]
    calls: set[tuple[str, str]]


@dataclass
class Graph:
    """A parsed GraphProto.

    Attributes:
        nodes: its nodes, in file order.
        initializers: encoded TensorProtos by name, e.g. {"fc.weight": ...}.
        sparse: encoded fields (key and SparseTensorProto) by name.
        inputs: encoded ValueInfoProtos of the inputs, by name.
        outputs: encoded ValueInfoProtos of the outputs, by name.
        values: encoded ValueInfoProtos of other values, by name.
        rest: all other encoded fields.
    """

    nodes: list[Node] = field(default_factory=list)
    initializers: dict[str, memoryview] = field(default_factory=dict)
    sparse: dict[str, memoryview] = field(default_factory=dict)
    inputs: dict[str, memoryview] = field(default_factory=dict)
    outputs: dict[str, memoryview] = field(default_factory=dict)
    values: dict[str, memoryview] = field(default_factory=dict)
    rest: list[memoryview] = field(default_factory=list)


def reads_and_calls(node: Bytes) -> tuple[set[str], set[tuple[str, str]]]:
    """Returns the names that a node and its subgraphs read, and the (domain, op type) pairs of their nodes."""
    # The names include those that a subgraph defines itself. This is harmless, because ONNX does not allow a subgraph
    # to shadow an outer name.
    reads, calls = set(wire.strings(node, proto.NODE_INPUT)), {_op(node)}
    for attribute in wire.messages(node, proto.NODE_ATTRIBUTE):
        for subgraph in (
            *wire.messages(attribute, proto.ATTRIBUTE_GRAPH),
            *wire.messages(attribute, proto.ATTRIBUTE_GRAPHS),
        ):
            reads |= {wire.string(output, 1) for output in wire.messages(subgraph, proto.GRAPH_OUTPUT)}
            for inner in wire.messages(subgraph, proto.GRAPH_NODE):
                inner_reads, inner_calls = reads_and_calls(inner)
                reads |= inner_reads
                calls |= inner_calls
    return reads, calls


def _op(node: Bytes) -> tuple[str, str]:
    """Returns the domain and op type of a node, e.g. ("", "Gemm")."""
    return wire.string(node, proto.NODE_DOMAIN), wire.string(node, proto.NODE_OP_TYPE)


def parse_graph(message: Bytes) -> Graph:
    """Parses a GraphProto."""
    graph = Graph()
    named = {
        proto.GRAPH_INPUT: graph.inputs,
        proto.GRAPH_OUTPUT: graph.outputs,
        proto.GRAPH_VALUE: graph.values,
    }
    for part in wire.parse(message):
        if part.number == proto.GRAPH_NODE:
            reads, calls = reads_and_calls(part.payload)
            graph.nodes.append(Node(part.raw, reads, wire.strings(part.payload, proto.NODE_OUTPUT), calls))
        elif part.number == proto.GRAPH_INITIALIZER:
            graph.initializers[wire.string(part.payload, proto.TENSOR_NAME)] = part.payload
        elif part.number == proto.GRAPH_SPARSE:
            # A SparseTensorProto is named by its values, a TensorProto.
            values = wire.messages(part.payload, 1)
            graph.sparse[wire.string(values[0], proto.TENSOR_NAME) if values else ""] = part.raw
        elif part.number in named:
            named[part.number][wire.string(part.payload, 1)] = part.payload
        else:
            graph.rest.append(part.raw)
    return graph


def prune(graph: Graph, outputs: Sequence[str]) -> set[str]:
    """Removes the nodes on which `outputs` do not depend, and sorts the others topologically, in place.

    Returns:
        The names of all values on which `outputs` depend, and of `outputs` themselves.
    """
    # Follows producers instead of the order of nodes. ONNX Runtime loads nodes in any order, so a tool may have moved
    # them; relying on the order once lost nodes.
    producers = {name: index for index, node in enumerate(graph.nodes) for name in node.writes if name}
    needed: set[str] = set()
    pending = list(outputs)
    kept: set[int] = set()
    while pending:
        name = pending.pop()
        needed.add(name)
        index = producers.get(name)
        if index is not None and index not in kept:
            kept.add(index)
            needed.update(graph.nodes[index].writes)
            pending += graph.nodes[index].reads - needed
    # Sorted, because onnx's checker and other readers of the exported model require it.
    before = {
        index: {producers[name] for name in graph.nodes[index].reads if name in producers} - {index}
        for index in kept
    }
    graph.nodes = [graph.nodes[index] for index in _in_order(before)]
    return needed


def _in_order(before: Mapping[int, set[int]]) -> list[int]:
    """Returns node indices in topological order, as close to ascending as possible.

    Args:
        before: for each node index, the indices of nodes that must precede it, e.g. {3: {0, 1}, 0: set(), 1: set()}.
    """
    # Kahn's algorithm with a heap, so that nodes in a valid order are not moved.
    waiting = {index: len(earlier) for index, earlier in before.items()}
    behind: dict[int, list[int]] = {index: [] for index in before}
    for index, earlier in before.items():
        for other in earlier:
            behind[other].append(index)
    ready = [index for index, count in waiting.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for other in behind[index]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, other)
    # A valid model has no cycle. If a subgraph shadows an outer name, the reads may form one; the file order is then
    # the best one known.
    return order if len(order) == len(before) else sorted(before)
