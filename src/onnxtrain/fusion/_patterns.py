"""Defines patterns, which look like the computation that they recognize: `op.Mul(op.Div(x, root), scale)`.

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
from onnxtrain.passes import is_stop_gradient, read_once


class Match(dict[str, Any]):
    """Bindings of a pattern's names to values, numbers and nodes, e.g. {"x": <value a>, "epsilon": 1e-5}."""

    def bound(self, names: Mapping[str, Any]) -> Match | None:
        """Returns this match with additional bindings, or None if a name is already bound to something else."""
        if any(name in self and self[name] != thing for name, thing in names.items()):
            return None
        return Match(self | dict(names))


class Pattern(Protocol):
    """A computation to search for, ending in a value."""

    def matches(self, value: ir.Value | None, match: Match) -> Iterator[Match]:
        """Yields, for each way to match `value`, a copy of `match` with the new bindings."""


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
class _StopGradient:
    pattern: Pattern
    name: str

    def matches(self, value: ir.Value | None, match: Match) -> Iterator[Match]:
        stops = list(_stop_gradients(value))
        if stops:
            for inner in self.pattern.matches(stops[-1].inputs[0], match):
                yield from _with(inner, {self.name: stops[-1]})


@dataclass(frozen=True)
class _OptionalStopGradient:
    pattern: Pattern

    def matches(self, value: ir.Value | None, match: Match) -> Iterator[Match]:
        # Several stop-gradient nodes may follow one another, from repeated detach() calls.
        for source in (value, *(node.inputs[0] for node in _stop_gradients(value))):
            yield from self.pattern.matches(source, match)


@dataclass(frozen=True)
class NodePattern:
    """Pattern of a node of the standard domain.

    Attributes:
        op_type: op of the node, e.g. "Mul".
        inputs: patterns of the inputs, in any order if the op is commutative; `...` matches any further inputs.
        where: additional condition on the node: returns names to bind, or None for no match.
        name: name to bind to the node's output.
        shared: True if nodes outside the pattern may read the output too.
    """

    op_type: str
    inputs: tuple[Pattern | EllipsisType, ...]
    where: Callable[[ir.Node], Mapping[str, Any] | None] = field(default=lambda node: {})
    name: str = ""
    shared: bool = False

    def matches(self, value: ir.Value | None, match: Match) -> Iterator[Match]:
        """Yields, for each way to match the node that computes `value`, a copy of `match` with the new bindings."""
        # A value with other readers must be kept, so fusing its chain would compute it twice.
        node = value.producer() if value is not None and (self.shared or read_once(value)) else None
        if node is not None:
            yield from self._matches_node(node, match)

    def found(self, last: ir.Node) -> Iterator[Match]:
        """Yields a match for each way to match a chain of nodes that ends with `last`."""
        # Unlike intermediate values, the output of the last node may have any readers: the composite op computes it
        # too.
        yield from self._matches_node(last, Match())

    def _matches_node(self, node: ir.Node, match: Match) -> Iterator[Match]:
        if node.op_type != self.op_type or node.domain != "":
            return
        more = self.where(node)
        output = {self.name: node.outputs[0]} if self.name else {}
        start = None if more is None else match.bound({**more, **output})
        if start is None:
            return
        # Trailing absent optional inputs may be None or left out.
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
    """Creates patterns: `op.Name(*inputs, where=..., name=..., shared=...)` returns a `NodePattern`."""

    def __getattr__(self, op_type: str) -> Callable[..., NodePattern]:
        def pattern(*inputs: Pattern | EllipsisType, **options: Any) -> NodePattern:
            return NodePattern(op_type, inputs, **options)

        return pattern


op = _Ops()


def value(name: str) -> Pattern:
    """Returns a pattern that matches any value. Patterns with the same name match the same value."""
    return _Value(name)


def number(name: str = "", of: Callable[[float], float | None] = lambda constant: constant) -> Pattern:
    """Returns a pattern that matches a constant with one element, and binds `name` to `of(constant)`.

    There is no match if `of` returns None.
    """
    return _Number(name, of)


def equal_to(wanted: float) -> Pattern:
    """Returns a pattern that matches the constant `wanted`."""
    return number(of=lambda constant: constant if constant == wanted else None)


def either(*patterns: Pattern) -> Pattern:
    """Returns a pattern that matches if any of the given patterns matches."""
    return _Either(patterns)


def stopped(pattern: Pattern, name: str) -> Pattern:
    """Returns a pattern that matches `pattern` followed by stop-gradient nodes, at least one.

    Binds `name` to the first of these nodes.
    """
    return _StopGradient(pattern, name)


def optional_stop_gradient(pattern: Pattern) -> Pattern:
    """Returns a pattern that matches a value with or without a stop-gradient node after it."""
    return _OptionalStopGradient(pattern)


def _stop_gradients(value: ir.Value | None) -> Iterable[ir.Node]:
    """Yields the chain of stop-gradient nodes that computes `value`, last node first."""
    while value is not None and (node := value.producer()) is not None and is_stop_gradient(node):
        yield node
        value = node.inputs[0]


def constant(value: ir.Value | None) -> float | None:
    """Returns the number in a constant with one element; None for other values."""
    node = value.producer() if value is not None else None
    if node is not None and node.op_type == "Cast" and node.domain == "":
        # A float64 graph may read a float32 constant through a Cast.
        value = node.inputs[0]
    # An initializer that is also a graph input is no constant: the caller may feed another value.
    if value is None or value.is_graph_input():
        return None
    # Not `known_array`, which would load the data of large weights.
    tensor = ir.convenience.get_const_tensor(value)
    return float(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None
