"""Partitions a functional ATen graph into parts that ONNX Runtime runs and parts that PyTorch runs.

The graph has no views, and writes to inputs only at its end, so partitioning does not change results. Random numbers
are drawn in the same order as in the whole graph.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

_TOO_FEW = "too few operators, between others that run in PyTorch, for a session of their own"
"""Fallback reason of operators that have a lowering, but would form a part that is not worth a session."""

# Running a session takes as long as a few elementwise operators.
_MIN_OPERATORS = 3
"""Minimum number of operators in a part that ONNX Runtime runs, if none of them is in `_EXPENSIVE`."""

_EXPENSIVE = ("mm", "addmm", "bmm", "baddbmm", "convolution", "recurrent_layer", "linear", "attention")
"""An operator whose name contains one of these words is worth a session by itself."""


@dataclass(frozen=True)
class Part:
    """A part of a graph that runs in one engine.

    Attributes:
        graph_module: the part as a graph. Its placeholders are copies of `inputs`, its outputs copies of `outputs`.
        inputs: nodes of the whole graph that the part reads from outside.
        outputs: nodes of the whole graph that the part computes for other parts or for the output node.
        in_pytorch: True if PyTorch runs the part, False if ONNX Runtime does.
    """

    graph_module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    in_pytorch: bool


def partition(graph_module: fx.GraphModule, in_pytorch: dict[fx.Node, str]) -> list[Part]:
    """Splits a graph into parts that run in ONNX Runtime or in PyTorch, and returns the parts in execution order.

    The list is empty if no part is worth an ONNX Runtime session.

    Args:
        graph_module: a functional graph. It may end with `aten.copy_` to placeholders, which belong to no part.
        in_pytorch: the nodes that PyTorch runs, each with the reason. `partition` adds the nodes of parts that are not
            worth an ONNX Runtime session.
    """
    while True:
        levels = _Levels(graph_module.graph, in_pytorch).assign()
        by_level: dict[int, list[fx.Node]] = {}
        for node, level in levels.items():
            by_level.setdefault(level, []).append(node)
        # Repeats, because moving a part to PyTorch may make other parts too small.
        small = [nodes for level, nodes in by_level.items() if level % 2 == 0 and not _is_worth_it(nodes)]
        if not small:
            break
        in_pytorch.update((node, _TOO_FEW) for nodes in small for node in nodes)
    if all(level % 2 for level in by_level):
        return []
    return [_part(graph_module, set(nodes), level % 2 == 1) for level, nodes in sorted(by_level.items())]


def calls(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Returns the nodes that call an operator on tensors, except `getitem` and writes to placeholders."""
    return [
        node
        for node in nodes
        if node.op == "call_function"
        and node.target is not operator.getitem
        and not is_number(node)
        and not _writes_back(node)
    ]


def mutations(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Maps each mutated placeholder to the node that computes its new value."""
    return {node.args[0]: node.args[1] for node in graph.nodes if _writes_back(node)}


def is_number(node: fx.Node) -> bool:
    """True if the node's result is a Python number or a symbolic number."""
    return isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def _writes_back(node: fx.Node) -> bool:
    """True if the node copies a value into a placeholder."""
    return str(node.target) == "aten.copy_.default" and _is_placeholder(node.args[0])


def _is_placeholder(argument: Any) -> bool:
    return isinstance(argument, fx.Node) and argument.op == "placeholder"


def _is_worth_it(nodes: list[fx.Node]) -> bool:
    """True if the nodes compute enough to be worth an ONNX Runtime session."""
    # Views take no time in either engine.
    computing = [node for node in calls(nodes) if not getattr(node.target, "is_view", False)]
    names = [str(node.target).split(".")[-2] for node in computing if "." in str(node.target)]
    return len(computing) >= _MIN_OPERATORS or any(word in name for name in names for word in _EXPENSIVE)


class _Levels:
    """Assigns a level to each node. Nodes on the same level form a part, and parts run in the order of their levels.

    Even levels run in ONNX Runtime, odd ones in PyTorch. A node reads only nodes on its own or lower levels. The
    number of levels is the smallest possible: the path with the most changes of engine determines it. Each node is on
    its highest possible level, so that values computed from parameters alone, e.g. a transposed weight, are in the
    part that reads them.
    """

    def __init__(self, graph: fx.Graph, in_pytorch: Mapping[fx.Node, str]) -> None:
        shared_nodes = _shared_nodes(graph)
        self._nodes = [node for node in graph.nodes if node not in shared_nodes and not _writes_back(node)]
        self._odd: dict[fx.Node, bool] = {}
        for node in self._nodes:
            # A `getitem` runs in the engine of its producer, and arithmetic on numbers from PyTorch in PyTorch.
            source = _producer(node)
            follows = is_number(node) and any(self._odd.get(s, False) for s in node.all_input_nodes)
            self._odd[node] = self._odd[source] if source is not node else node in in_pytorch or follows
        # Random nodes keep their order: none may be on a higher level than the next one.
        random = [node for node in self._nodes if is_random(node)]
        self._next_random = dict(itertools.pairwise(random))
        self._previous_random = {later: earlier for earlier, later in self._next_random.items()}

    def assign(self) -> dict[fx.Node, int]:
        """Returns the level of each node.

        For example, if `poisson`, which PyTorch runs, reads `mm`, and `add` reads `poisson`, these are
        {mm: 0, poisson: 1, add: 2}.
        """
        lowest = self._lowest_levels()
        highest: dict[fx.Node, int] = {}
        top = max(lowest.values(), default=0)
        for node in reversed(self._nodes):
            odd = self._odd[node]
            limit = top
            for user in node.users:
                if user in highest:
                    limit = min(limit, highest[user] - (self._odd[user] != odd))
            if node in self._next_random:
                limit = min(limit, highest[self._next_random[node]])
            highest[node] = limit - (limit % 2 != odd)
        # A `getitem` is on the level of its producer, which may be lower than its own highest level.
        return {node: highest[_producer(node)] for node in self._nodes}

    def _lowest_levels(self) -> dict[fx.Node, int]:
        """Returns the lowest possible level of each node."""
        lowest: dict[fx.Node, int] = {}
        for node in self._nodes:
            odd = self._odd[node]
            limit = int(odd)
            for source in node.all_input_nodes:
                if source in lowest:
                    limit = max(limit, lowest[source] + (self._odd[source] != odd))
            if node in self._previous_random:
                limit = max(limit, lowest[self._previous_random[node]])
            lowest[node] = limit + (limit % 2 != odd)
        return lowest


def _shared_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes that belong to no level: placeholders, attributes, the output, and numbers computed from these.

    Each part gets its own copies of the shared nodes that it reads.
    """
    shared_nodes: set[fx.Node] = set()
    for node in graph.nodes:
        number = is_number(node) and all(source in shared_nodes for source in node.all_input_nodes)
        if number or node.op in ("placeholder", "get_attr", "output"):
            shared_nodes.add(node)
    return shared_nodes


def _producer(node: fx.Node) -> fx.Node:
    """Returns the node whose result a `getitem` node selects, or the node itself if it is not a `getitem`."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def is_random(node: fx.Node) -> bool:
    """True if the node draws random numbers from a PyTorch generator, e.g. `aten.poisson`."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _part(graph_module: fx.GraphModule, nodes: set[fx.Node], in_pytorch: bool) -> Part:
    """Returns a part with copies of the nodes of one level."""
    order = [node for node in graph_module.graph.nodes if node in nodes]
    outputs = tuple(node for node in order if any(user not in nodes for user in node.users))
    graph, copies = fx.Graph(), {}
    inputs = _read_nodes(graph_module.graph, order, nodes)
    for node in inputs:
        copies[node] = graph.create_node("placeholder", node.name, name=node.name)
        copies[node].meta = {**node.meta, "example_value": node.meta.get("val")}

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            for source in node.all_input_nodes:
                copied(source)
            copies[node] = graph.node_copy(node, copies.__getitem__)
        return copies[node]

    for node in order:
        copied(node)
    graph.output(tuple(copies[node] for node in outputs))
    return Part(fx.GraphModule(graph_module, graph), inputs, outputs, in_pytorch)


def _read_nodes(graph: fx.Graph, order: list[fx.Node], inside: set[fx.Node]) -> tuple[fx.Node, ...]:
    """Returns the nodes that a part takes as inputs, in the order of the graph.

    These are the nodes outside the part that it reads, and all placeholders that are numbers. Attributes, and numbers
    computed from placeholders, are copied into the part instead.

    Args:
        graph: the whole graph.
        order: the nodes of the part, in the order of the graph.
        inside: the same nodes as a set.
    """
    # All sizes among the placeholders are included, because the shapes of random inputs are computed from them.
    read = {node: None for node in graph.nodes if node.op == "placeholder" and is_number(node)}
    shared_nodes = _shared_nodes(graph)
    stack = [source for node in order for source in node.all_input_nodes]
    seen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in seen or node in inside or node.op == "get_attr":
            continue
        seen.add(node)
        if node in shared_nodes and node.op != "placeholder":
            stack += node.all_input_nodes
        else:
            read[node] = None
    return tuple(node for node in graph.nodes if node in read)
