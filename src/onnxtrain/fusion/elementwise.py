"""Fuses elementwise ops into programs, which a native kernel runs on one block of elements after the other.

ONNX Runtime runs a chain of elementwise ops one op at a time, each over all elements in memory. The native kernel of
`Elementwise` runs the whole chain on a block that fits the first-level cache, then on the next block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.fusion._domain import Domain, domain_of
from onnxtrain.fusion._instructions import (
    INSTRUCTIONS,
    elementwise_leaves,
    is_elementwise,
    window_source,
)
from onnxtrain.fusion._pass import KeepingPass
from onnxtrain.fusion._programs import MOST_INPUTS, MOST_INSTRUCTIONS, MOST_OUTPUTS, rewrite
from onnxtrain.fusion._windows import Reduction, reduction_of, window_of
from onnxtrain.passes import dims_of, is_constant, reads, remove_unread_chains, remove_unread_initializers

__all__ = ["INSTRUCTIONS", "MOST_INPUTS", "MOST_OUTPUTS", "ElementwisePass", "is_elementwise", "window_of"]


class ElementwisePass(KeepingPass):
    """Replaces connected elementwise float32 ops whose results have one shape with calls of `Elementwise` functions.

    Inputs of a chain may broadcast. The pass needs inferred shapes, with a name for each symbolic size. Comparisons are
    part of the chains of their readers, and are computed again in each; they remain if other nodes read them. Other
    bool values that conditions of Where depend on, or of which a chain reads the Cast, are read as they are if they
    have the shape of the results, e.g. the masks of dropout. If not, e.g. causal masks, they become float32 inputs: one
    Cast of each value is shared by all functions that read it.

    Slice, and Pad with zeros, of one axis are part of a chain, too, where rows are short. So are sums, means,
    maxima and minima of a chain's results over the first or the last axes.

    Run this pass last: the functions have no gradient rules, and other passes look for the standard ops.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place; subgraphs are not modified."""
        op = Emitter(model.graph, functions=model.functions)
        remove_unread_chains(model.graph, tuple(model.graph))
        groups = _Grouping(model, self.keeps).groups()
        # Groups of one node last: other groups may compute the node themselves.
        groups.sort(key=lambda group: len(group.nodes) == 1)
        modified = [rewrite(op, group.nodes, group.domain, model.functions) for group in groups]
        if any(modified):
            model.graph.sort()
            # The programs hold the numbers of the ops that they replace.
            constants = [value for value in model.graph.initializers.values() if is_constant(value)]
            remove_unread_initializers(model.graph, constants)
        return ir.passes.PassResult(model, any(modified))


@dataclass
class _Group:
    """Nodes that become one call.

    Attributes:
        domain: sizes of all results.
        nodes: the nodes, in the order of the graph.
        below: bit mask of the numbers of all groups that this one depends on.
        read: the values that the nodes read, those of the group among them.
        size: estimate of the number of instructions.
    """

    domain: Domain
    nodes: list[ir.Node] = field(default_factory=list)
    below: int = 0
    read: set[ir.Value] = field(default_factory=set)
    size: int = 0


class _Grouping:
    """Decides which nodes of a graph become one call.

    A node joins the groups of its inputs, unless the call would then depend on itself, because another input of the
    node is computed from the group's results by other nodes.
    """

    def __init__(self, model: ir.Model, keeps: Callable[[ir.Node], bool]) -> None:
        self._model, self._keeps = model, keeps
        self._places = {node: place for place, node in enumerate(model.graph)}
        self._groups: list[_Group] = []
        self._group_of: dict[ir.Value, int] = {}
        self._reduced: dict[ir.Value, Reduction] = {}
        # For each value that is computed outside of the groups, the bit mask of the groups that it depends on.
        self._behind: dict[ir.Value, int] = {}

    def groups(self) -> list[_Group]:
        """Returns the groups."""
        for node in self._model.graph:
            if self._keeps(node) or not self._take(node):
                mask = 0
                for value in reads(node):
                    mask |= self._needed(value)
                if mask:
                    self._behind.update(dict.fromkeys(node.outputs, mask))
        return [group for group in self._groups if group.nodes]

    def _take(self, node: ir.Node) -> bool:
        """Adds a node to a group; False if it stays outside."""
        if window_of(node) is not None or reduction_of(node) is not None:
            # Only of a group's result; of other values, nodes that read a window read its source.
            source = node.inputs[0]
            if source not in self._group_of:
                return False
            return self._place(node, [source], may_begin=False)
        leaves = elementwise_leaves(node, self._model.functions)
        return leaves is not None and (self._add_reductions(node) or self._place(node, leaves))

    def _add_reductions(self, node: ir.Node) -> bool:
        """Adds the sum of two reductions to their group, which reduces their sum; False if it is no such sum."""
        found = [self._reduced.get(value) for value in node.inputs if value is not None]
        numbers = {self._group_of.get(value) for value in node.inputs if value is not None}
        dims = [dims_of(value) for value in node.inputs if value is not None]
        if node.op_type != "Add" or found[0] is None or found[0] != found[-1] or len(numbers) > 1:
            return False
        # The maximum of a sum is not the sum of the maxima.
        if not found[0].is_linear:
            return False
        if dims[0] != dims[-1]:
            return False
        number = self._group_of[node.inputs[0]]  # type: ignore[index]
        if not self._has_room([number], []):
            return False
        group = self._groups[number]
        group.nodes.append(node)
        group.size += self._size(node)
        self._group_of[node.outputs[0]] = number
        self._reduced[node.outputs[0]] = found[0]
        return True

    def _needed(self, value: ir.Value) -> int:
        """Returns the bit mask of the groups that a value depends on, with its own."""
        number = self._group_of.get(value)
        mask = needed = self._behind.get(value, 0) if number is None else 1 << number
        while mask:
            lowest = mask & -mask
            needed |= self._groups[lowest.bit_length() - 1].below
            mask ^= lowest
        return needed

    def _place(self, node: ir.Node, leaves: Sequence[ir.Value], may_begin: bool = True) -> bool:
        """Adds a node to the group of its inputs, or to a new group if it may begin one; False if it has no group."""
        domain, joined = domain_of(node), None
        for number in dict.fromkeys(self._group_of[v] for v in leaves if v in self._group_of):
            merged = domain.merged(self._groups[number].domain)
            if merged is None or not self._may_join(number, node, leaves):
                continue
            if joined is None:
                joined, domain = number, merged
            elif self._may_merge(joined, number, leaves):
                self._merge(joined, number)
                domain = merged
        if joined is None or not self._has_room([joined], leaves):
            if not may_begin:
                return False
            joined, domain = len(self._groups), domain_of(node)
            self._groups.append(_Group(domain))
        group = self._groups[joined]
        group.domain = domain
        group.nodes.append(node)
        group.read.update(map(self._source, leaves))
        group.size += self._size(node)
        self._group_of[node.outputs[0]] = joined
        reduction = reduction_of(node)
        if reduction is not None:
            self._reduced[node.outputs[0]] = reduction
        self._depend(joined, leaves)
        return True

    def _source(self, leaf: ir.Value) -> ir.Value:
        """Returns the value that a program reads for a leaf: the source of a window that is outside of all groups."""
        node = leaf.producer()
        if node is None or (leaf in self._group_of and window_of(node) is not None):
            return leaf
        return window_source(leaf) or leaf

    def _size(self, node: ir.Node) -> int:
        """Returns about how many instructions a node is."""
        function = self._model.functions.get(node.op_identifier())
        return 1 + (len(function) if function is not None else len(node.inputs))

    def _may_join(self, number: int, node: ir.Node, leaves: Sequence[ir.Value]) -> bool:
        """True if no leaf outside of a group depends on the group, and the node can read the group's results."""
        for leaf in leaves:
            if self._group_of.get(leaf) != number:
                if self._needed(leaf) >> number & 1:
                    return False
            elif leaf in self._reduced or (dims_of(leaf) != dims_of(node.outputs[0]) and len(leaves) > 1):
                return False
        return True

    def _may_merge(self, one: int, other: int, leaves: Sequence[ir.Value]) -> bool:
        """True if two groups don't depend on each other, and their nodes fit one call."""
        first, second = self._groups[one], self._groups[other]
        return not (first.below >> other | second.below >> one) & 1 and self._has_room([one, other], leaves)

    def _has_room(self, numbers: Sequence[int], leaves: Sequence[ir.Value]) -> bool:
        """True if the nodes of some groups, and one more, fit one call."""
        read = set(map(self._source, leaves)).union(*(self._groups[number].read for number in numbers))
        size = sum(self._groups[number].size for number in numbers)
        inputs = sum(self._group_of.get(value) not in numbers for value in read)
        return inputs <= MOST_INPUTS and size < MOST_INSTRUCTIONS

    def _merge(self, kept: int, other: int) -> None:
        """Moves the nodes of a group to another one. Its number then stands for a group without nodes."""
        group, gone = self._groups[kept], self._groups[other]
        for node in gone.nodes:
            self._group_of[node.outputs[0]] = kept
        group.nodes = sorted([*group.nodes, *gone.nodes], key=self._places.__getitem__)
        group.read |= gone.read
        group.size += gone.size
        gone.nodes = []
        # Values behind the other group depend on the kept one, and on what it depends on.
        self._extend(kept, gone.below)
        self._extend(other, group.below | 1 << kept)

    def _depend(self, number: int, leaves: Sequence[ir.Value]) -> None:
        needed = 0
        for leaf in leaves:
            needed |= self._needed(leaf)
        self._extend(number, needed & ~(1 << number))

    def _extend(self, number: int, needed: int) -> None:
        """Records that a group, and all that depend on it, depend on other groups."""
        if needed & ~self._groups[number].below == 0:
            return
        self._groups[number].below |= needed
        for group in self._groups:
            if group.below >> number & 1:
                group.below |= needed
