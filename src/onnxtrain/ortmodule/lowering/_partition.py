"""Cut a functional ATen graph into parts that ONNX Runtime runs and parts that PyTorch runs.

The graph has no views, and writes to inputs at its end only, so that no cut changes a value. Random numbers are drawn
in the order of the uncut graph.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

TOO_FEW = "too few operators, between others that run in PyTorch, for a session of their own"
# A run of a session takes as long as some elementwise operators.
_FEW = 3
"""The least number of operators for a part of elementwise arithmetic in ONNX Runtime."""
# One of these is worth a session by itself.
_HEAVY = ("mm", "addmm", "bmm", "baddbmm", "convolution", "recurrent_layer", "linear", "attention")


@dataclass(frozen=True)
class Part:
    """A part of a graph.

    Attributes:
        graph_module: the part. Its placeholders are copies of the nodes in `takes`, its outputs of those in `gives`.
        takes: nodes of the whole graph that the part reads.
        gives: nodes of the part that other parts, or the outputs, read.
        in_pytorch: True if PyTorch runs the part, False if ONNX Runtime does.
    """

    graph_module: fx.GraphModule
    takes: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]
    in_pytorch: bool


def partition(graph_module: fx.GraphModule, refused: dict[fx.Node, str]) -> list[Part]:
    """Returns the parts in the order in which they run; an empty list if ONNX Runtime would run too little.

    Args:
        graph_module: the graph, functional but for `aten.copy_` to placeholders at its end, which belong to no part.
        refused: the nodes that PyTorch is to run, with the reasons. Nodes that are not worth a session are added.
    """
    while True:
        levels = _Levels(graph_module.graph, refused).assign()
        by_level: dict[int, list[fx.Node]] = {}
        for node, level in levels.items():
            by_level.setdefault(level, []).append(node)
        # Giving a small part to PyTorch may leave its neighbours too small, hence the loop.
        small = [nodes for level, nodes in by_level.items() if level % 2 == 0 and not _is_worth_it(nodes)]
        if not small:
            break
        refused.update((node, TOO_FEW) for nodes in small for node in nodes)
    if all(level % 2 for level in by_level):
        return []
    return [_part(graph_module, set(nodes), level % 2 == 1) for level, nodes in sorted(by_level.items())]


def calls(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Returns the nodes that compute tensors, without numbers, `getitem` and final writes to placeholders."""
    return [
        node
        for node in nodes
        if node.op == "call_function"
        and node.target is not operator.getitem
        and not is_number(node)
        and not _writes_back(node)
    ]


def mutations(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Returns the placeholders that the graph writes to at its end, with the nodes whose values they get."""
    return {node.args[0]: node.args[1] for node in graph.nodes if _writes_back(node)}


def is_number(node: fx.Node) -> bool:
    """Tells whether a node's result is a number, symbolic or not."""
    return isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def _writes_back(node: fx.Node) -> bool:
    return str(node.target) == "aten.copy_.default" and _is_placeholder(node.args[0])


def _is_placeholder(argument: Any) -> bool:
    return isinstance(argument, fx.Node) and argument.op == "placeholder"


def _is_worth_it(nodes: list[fx.Node]) -> bool:
    """Tells whether a part computes enough for a session."""
    # Views cost nothing in either runtime.
    computing = [node for node in calls(nodes) if not getattr(node.target, "is_view", False)]
    names = [str(node.target).split(".")[-2] for node in computing if "." in str(node.target)]
    return len(computing) >= _FEW or any(word in name for name in names for word in _HEAVY)


class _Levels:
    """Assigns each node a level, even for ONNX Runtime and odd for PyTorch; a node reads from its level or lower ones.

    There are as many levels as the longest alternation of the two. Each node is on the latest level possible, so that
    what is computed from parameters alone, e.g. a transposed weight, is in the part that reads it.
    """

    def __init__(self, graph: fx.Graph, refused: Mapping[fx.Node, str]) -> None:
        shared_nodes = _shared_nodes(graph)
        self._nodes = [node for node in graph.nodes if node not in shared_nodes and not _writes_back(node)]
        self._odd: dict[fx.Node, bool] = {}
        for node in self._nodes:
            # The results of one node run where the node runs. A number that comes from PyTorch is computed there.
            source = _producer(node)
            follows = is_number(node) and any(self._odd.get(s, False) for s in node.all_input_nodes)
            self._odd[node] = self._odd[source] if source is not node else node in refused or follows
        # Draws keep their order across parts: each draw may be on the level of the next one or lower.
        random = [node for node in self._nodes if draws(node)]
        self._after = dict(itertools.pairwise(random))
        self._before = {later: earlier for earlier, later in self._after.items()}

    def assign(self) -> dict[fx.Node, int]:
        """Returns the level of each node, e.g. {mm: 0, poisson: 1, add: 2}."""
        # The earliest levels tell how many levels there must be.
        early = self._as_early_as_possible()
        late: dict[fx.Node, int] = {}
        top = max(early.values(), default=0)
        for node in reversed(self._nodes):
            odd = self._odd[node]
            limit = top
            for user in node.users:
                if user in late:
                    limit = min(limit, late[user] - (self._odd[user] != odd))
            if node in self._after:
                limit = min(limit, late[self._after[node]])
            late[node] = limit - (limit % 2 != odd)
        # A `getitem` is on the level of its node, which may be lower than its own latest one.
        return {node: late[_producer(node)] for node in self._nodes}

    def _as_early_as_possible(self) -> dict[fx.Node, int]:
        early: dict[fx.Node, int] = {}
        for node in self._nodes:
            odd = self._odd[node]
            least = int(odd)
            for source in node.all_input_nodes:
                if source in early:
                    least = max(least, early[source] + (self._odd[source] != odd))
            if node in self._before:
                least = max(least, early[self._before[node]])
            early[node] = least + (least % 2 != odd)
        return early


def _shared_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes that every part has: placeholders, attributes, outputs, and numbers computed from those."""
    shared_nodes: set[fx.Node] = set()
    for node in graph.nodes:
        number = is_number(node) and all(source in shared_nodes for source in node.all_input_nodes)
        if number or node.op in ("placeholder", "get_attr", "output"):
            shared_nodes.add(node)
    return shared_nodes


def _producer(node: fx.Node) -> fx.Node:
    """Returns the node that has this one among its several results, else the node itself."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def draws(node: fx.Node) -> bool:
    """Tells whether a node takes random numbers from a generator of PyTorch, e.g. `aten.poisson`."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _part(graph_module: fx.GraphModule, nodes: set[fx.Node], in_pytorch: bool) -> Part:
    """Copies the nodes of one level into a graph of their own."""
    order = [node for node in graph_module.graph.nodes if node in nodes]
    gives = tuple(node for node in order if any(user not in nodes for user in node.users))
    graph, copies = fx.Graph(), {}
    takes = _read_nodes(graph_module.graph, order, nodes)
    for node in takes:
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
    graph.output(tuple(copies[node] for node in gives))
    return Part(fx.GraphModule(graph_module, graph), takes, gives, in_pytorch)


def _read_nodes(graph: fx.Graph, order: list[fx.Node], inside: set[fx.Node]) -> tuple[fx.Node, ...]:
    """Returns the nodes that a part reads."""
    # Every size that the graph is given is taken: the shapes of random inputs are computed from sizes.
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
