"""Defines patterns, written as the computation that they recognise: `op.Mul(op.Div(x, root), scale)`.

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
    """The bindings of a pattern's names to values, numbers and nodes, e.g. {"x": <value a>, "epsilon": 1e-5}."""

    def bound(self, names: Mapping[str, Any]) -> Match | None:
        """Returns this match with more names, or None if a name is bound to something else already."""
        if any(name in self and self[name] != thing for name, thing in names.items()):
            return None
        return Match(self | dict(names))


class Pattern(Protocol):
    """A computation that a value may be the result of."""

    def matches(self, value: ir.Value | None, match: Match) -> Iterator[Match]:
        """Yields a match for each way in which the value is such a result, in agreement with `match`."""


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
        number = constant(value)
        result = None if number is None else self.of(number)
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
        # Several stops may follow one another, as several detach() do.
        for source in (value, *(node.inputs[0] for node in _stops(value))):
            yield from self.pattern.matches(source, match)


@dataclass(frozen=True)
class NodePattern:
    """A node of the standard domain.

    Attributes:
        op_type: its op, e.g. "Mul".
        inputs: patterns of its inputs, in any order if the op is commutative; `...` stands for any further inputs.
        where: further condition on the node: returns names to bind, or None for no match.
        name: name to bind to the node's output.
        shared: whether nodes outside of the pattern may read the output, too.
    """

    op_type: str
    inputs: tuple[Pattern | EllipsisType, ...]
    where: Callable[[ir.Node], Mapping[str, Any] | None] = field(default=lambda node: {})
    name: str = ""
    shared: bool = False

    def matches(self, value: ir.Value | None, match: Match) -> Iterator[Match]:
        """Yields a match for each way in which the value is the output of such a node."""
        # A value that others read must stay, and fusing its chain would compute it twice.
        node = value.producer() if value is not None and (self.shared or read_once(value)) else None
        if node is not None:
            yield from self._matches_node(node, match)

    def found(self, last: ir.Node) -> Iterator[Match]:
        """Yields a match for each way in which `last` is the last node of the chain. Anything may read its output."""
        # The result of the chain is the result of the composite op, so anything may read it.
        yield from self._matches_node(last, Match())

    def _matches_node(self, node: ir.Node, match: Match) -> Iterator[Match]:
        if node.op_type != self.op_type or node.domain != "":
            return
        more = self.where(node)
        output = {self.name: node.outputs[0]} if self.name else {}
        start = None if more is None else match.bound({**more, **output})
        if start is None:
            return
        # Absent optional inputs at the end may be written as None, or left out.
        inputs = list(node.inputs)
        while inputs and inputs[-1] is None:
            inputs.pop()
        patterns = [pattern for pattern in self.inputs if not isinstance(pattern, EllipsisType)]
        if len(inputs) < len(patterns) or (len(inputs) > len(patterns) and ... not in self.inputs):
            return
        orders = itertools.permutations(inputs) if self.op_type in COMMUTATIVE else [inputs]
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
    """Writes patterns: `op.Name(*inputs, where=..., name=..., shared=...)` makes a `NodePattern`."""

    def __getattr__(self, op_type: str) -> Callable[..., NodePattern]:
        def pattern(*inputs: Pattern | EllipsisType, **options: Any) -> NodePattern:
            return NodePattern(op_type, inputs, **options)

        return pattern


op = _Ops()


def value(name: str) -> Pattern:
    """Returns the pattern of any value. Patterns of one name match one value."""
    return _Value(name)


def number(name: str = "", of: Callable[[float], float | None] = lambda constant: constant) -> Pattern:
    """Returns the pattern of a constant of one element, bound to `of(constant)`. None from `of` is no match."""
    return _Number(name, of)


def equal_to(wanted: float) -> Pattern:
    """Returns the pattern of one number."""
    return number(of=lambda constant: constant if constant == wanted else None)


def either(*patterns: Pattern) -> Pattern:
    """Returns the pattern that matches what any of the patterns matches."""
    return _Either(patterns)


def stopped(pattern: Pattern, name: str) -> Pattern:
    """Returns the pattern of a value behind a stop of gradients. `name` is bound to the first node that stops them."""
    return _Stopped(pattern, name)


def perhaps_stopped(pattern: Pattern) -> Pattern:
    """Returns the pattern of a value, with or without a stop of gradients behind it."""
    return _PerhapsStopped(pattern)


def _stops(value: ir.Value | None) -> Iterable[ir.Node]:
    """Yields the chain of nodes before `value` that stop gradients, the last one first."""
    while value is not None and (node := value.producer()) is not None and is_stop_gradient(node):
        yield node
        value = node.inputs[0]


def read_once(value: ir.Value) -> bool:
    """Tells whether exactly one node, and no graph output, reads a value, at however many of its inputs."""
    # A square reads its operand twice, but is one reader.
    return not value.is_graph_output() and len({id(use.node) for use in value.uses()}) == 1


def constant(value: ir.Value | None) -> float | None:
    """Returns the number in a constant of one element, None for other values."""
    node = value.producer() if value is not None else None
    if node is not None and node.op_type == "Cast" and node.domain == "":
        # A float64 graph may read a float32 constant through a Cast.
        value = node.inputs[0]
    # The caller may feed another value to an initializer that is an input, too.
    if value is None or value.is_graph_input():
        return None
    # Not by `known_array`, which reads the values: of a weight the size is enough.
    tensor = ir.convenience.get_const_tensor(value)
    return float(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None
