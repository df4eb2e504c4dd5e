"""Patterns, written as the computation that they recognise: `op.Mul(op.Div(x, root), scale)`.

>>> x, scale = value("x"), value("scale")
>>> pattern = op.Mul(op.Reciprocal(op.Sqrt(x)), scale)
>>> model = ir.from_onnx_text('''<ir_version: 10, opset_import: ["": 21]>
...     net (float[3] a, float[3] b) => (float[3] y) { s = Sqrt(a)  r = Reciprocal(s)  y = Mul(b, r) }''')
>>> match = next(pattern.found(model.graph[-1]))
>>> match["x"].name, match["scale"].name
('a', 'b')
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, Protocol

import onnx_ir as ir

from onnxtrain.op_facts import COMMUTATIVE
from onnxtrain.passes import is_stop_gradient


class Match(dict[str, Any]):
    """What the names of a pattern stand for: values, numbers, nodes that stop gradients, and what `where` adds."""

    def bound(self, names: Mapping[str, Any]) -> Match | None:
        """Returns this match with more names, None where one of them stands for something else already."""
        if any(name in self and self[name] != thing for name, thing in names.items()):
            return None
        return Match(self | dict(names))


class Pattern(Protocol):
    """What a value may be computed as."""

    def matches(self, value: ir.Value | None, match: Match) -> Iterator[Match]:
        """Yields each way in which the value is computed so, in agreement with what is bound already."""


def _with(match: Match, names: Mapping[str, Any]) -> Iterator[Match]:
    result = match.bound(names)
    if result is not None:
        yield result


@dataclass(frozen=True)
class _Value:
    name: str

    def matches(self, value: ir.Value | None, match: Match) -> Iterator[Match]:
        if value is not None:
            yield from _with(match, {self.name: value})


@dataclass(frozen=True)
class _Number:
    name: str
    of: Callable[[float], float | None]

    def matches(self, value: ir.Value | None, match: Match) -> Iterator[Match]:
        given = constant(value)
        result = None if given is None else self.of(given)
        if result is not None:
            yield from _with(match, {self.name: result} if self.name else {})


@dataclass(frozen=True)
class _Either:
    patterns: tuple[Pattern, ...]

    def matches(self, value: ir.Value | None, match: Match) -> Iterator[Match]:
        for pattern in self.patterns:
            yield from pattern.matches(value, match)


@dataclass(frozen=True)
class _Stopped:
    pattern: Pattern
    name: str

    def matches(self, value: ir.Value | None, match: Match) -> Iterator[Match]:
        stops = list(_stops(value))
        if stops:
            for inner in self.pattern.matches(stops[-1].inputs[0], match):
                yield from _with(inner, {self.name: stops[-1]})


@dataclass(frozen=True)
class _PerhapsStopped:
    pattern: Pattern

    def matches(self, value: ir.Value | None, match: Match) -> Iterator[Match]:
        for source in (value, *(node.inputs[0] for node in _stops(value))):
            yield from self.pattern.matches(source, match)


@dataclass(frozen=True)
class NodePattern:
    """A node of the standard domain.

    Attributes:
        op_type: its op.
        inputs: what its inputs are computed as, in any order where that makes no difference; `...` for any more.
        where: what else must hold: returns what to bind, None where it does not.
        name: bound to the output of the node.
        shared: other nodes outside of the pattern may read the output.
    """

    op_type: str
    inputs: tuple[Pattern | EllipsisType, ...]
    where: Callable[[ir.Node], Mapping[str, Any] | None] = field(default=lambda node: {})
    name: str = ""
    shared: bool = False

    def matches(self, value: ir.Value | None, match: Match) -> Iterator[Match]:
        """Yields each way in which the value is the output of such a node, see `Pattern`."""
        node = value.producer() if value is not None and (self.shared or read_once(value)) else None
        if node is not None:
            yield from self._matches_node(node, match)

    def found(self, last: ir.Node) -> Iterator[Match]:
        """Yields each way in which a node is the last one of what is computed so; anything may read its output."""
        yield from self._matches_node(last, Match())

    def _matches_node(self, node: ir.Node, match: Match) -> Iterator[Match]:
        if node.op_type != self.op_type or node.domain != "":
            return
        more = self.where(node)
        own = {self.name: node.outputs[0]} if self.name else {}
        start = None if more is None else match.bound({**more, **own})
        if start is None:
            return
        given = list(node.inputs)
        while given and given[-1] is None:
            given.pop()
        patterns = [pattern for pattern in self.inputs if not isinstance(pattern, EllipsisType)]
        if len(given) < len(patterns) or (len(given) > len(patterns) and ... not in self.inputs):
            return
        orders = itertools.permutations(given) if self.op_type in COMMUTATIVE else [given]
        for order in orders:
            yield from _all(list(zip(patterns, order, strict=False)), start)


def _all(pairs: list[tuple[Pattern, ir.Value | None]], match: Match) -> Iterator[Match]:
    if not pairs:
        yield match
        return
    (pattern, value), *rest = pairs
    for first in pattern.matches(value, match):
        yield from _all(rest, first)


class _Ops:
    """Writes patterns: `op.Name(*inputs, where=..., name=..., shared=...)`, see `NodePattern`."""

    def __getattr__(self, op_type: str) -> Callable[..., NodePattern]:
        def pattern(*inputs: Pattern | EllipsisType, **options: Any) -> NodePattern:
            return NodePattern(op_type, inputs, **options)

        return pattern


op = _Ops()


def value(name: str) -> Pattern:
    """Returns the pattern of any value; the same one wherever the name stands."""
    return _Value(name)


def number(name: str = "", of: Callable[[float], float | None] = lambda constant: constant) -> Pattern:
    """Returns the pattern of a constant of one element, bound as what `of` makes of it; None is no match."""
    return _Number(name, of)


def equal_to(wanted: float) -> Pattern:
    """Returns the pattern of one number."""
    return number(of=lambda constant: constant if constant == wanted else None)


def either(*patterns: Pattern) -> Pattern:
    """Returns the pattern of what any of the patterns matches."""
    return _Either(patterns)


def stopped(pattern: Pattern, name: str) -> Pattern:
    """Returns the pattern of a value behind a stop of gradients; `name` is bound to the first node that stops."""
    return _Stopped(pattern, name)


def perhaps_stopped(pattern: Pattern) -> Pattern:
    """Returns the pattern of a value, or of one behind a stop of its gradients."""
    return _PerhapsStopped(pattern)


def _stops(value: ir.Value | None) -> Iterable[ir.Node]:
    """Yields the nodes behind one another that stop gradients, the last one first."""
    while value is not None and (node := value.producer()) is not None and is_stop_gradient(node):
        yield node
        value = node.inputs[0]


def read_once(value: ir.Value) -> bool:
    """Whether one node reads a value, at whatever inputs, and nothing else."""
    return not value.is_graph_output() and len({id(use.node) for use in value.uses()}) == 1


def constant(value: ir.Value | None) -> float | None:
    """Returns the number that a value always has."""
    node = value.producer() if value is not None else None
    if node is not None and node.op_type == "Cast" and node.domain == "":
        value = node.inputs[0]  # what a float64 graph reads a float32 constant through
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return float(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None
