"""Walks a graph in reverse, node by node, and emits gradients with the rule of each node's op.

A rule is just a formula. The driver does the work common to all rules: it skips cotangents that nothing reads, sums the
cotangents of broadcast inputs to the inputs' shapes, and accumulates the contributions to each value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import onnx_ir as ir

from onnxtrain.emitter import Emitter, output_dtype, schema_of
from onnxtrain.errors import DifferentiationError, NoGradientRule, ShapeRequired
from onnxtrain.passes import captured_values, is_stop_gradient

from ._accumulate import add_up
from ._activity import active_values, path_to_leaf
from ._broadcast import sum_to_shape_of
from ._node import NodeView, where
from ._registry import STEPS_OF_GRADIENTS, Cotangents, NonDifferentiable, Rule, reason_not_yet, rule_for


def pull_back(
    op: Emitter,
    seeds: Mapping[ir.Value, ir.Value],
    wrt: Sequence[ir.Value],
    nodes: Sequence[ir.Node] | None = None,
) -> list[ir.Value | None]:
    """Returns the vector-Jacobian products `sum over (y, seed) of seed^T · dy/dw` for every `w` in `wrt`.

    Args:
        op: emitter of the graph that contains all these values; gradient nodes are appended to it.
        seeds: the values to differentiate, each with its cotangent of the same shape and dtype.
        wrt: values to differentiate with respect to.
        nodes: nodes to differentiate, in topological order. Default: all nodes of the graph. Outputs of other nodes are
            treated as constants.

    Returns:
        One cotangent per value in `wrt`, with the same shape and dtype; None if no value in `seeds` depends on it.

    Raises:
        NoGradientRule: an op between `wrt` and `seeds` has no gradient rule.
        ShapeRequired: a rule needs a static size, but the size is symbolic.
    """
    nodes = list(op.graph) if nodes is None else nodes
    walk = _ReverseWalk(op, list(seeds), wrt, nodes)
    for value, seed in seeds.items():
        walk.add(value, seed)
    # Marks the Floor, Sign, ... that rules emit: straight-through rules must ignore them when the gradient is
    # differentiated again.
    outer_metadata, op.metadata = op.metadata, STEPS_OF_GRADIENTS
    for node in reversed(nodes):
        walk.visit(node)
    op.scope, op.metadata = "", outer_metadata
    return [walk.total(value) for value in wrt]


class _ReverseWalk:
    """State of one reverse walk: the active values, and the contributions to their cotangents so far."""

    def __init__(
        self, op: Emitter, of: Sequence[ir.Value], wrt: Sequence[ir.Value], nodes: Sequence[ir.Node]
    ) -> None:
        self.op = op
        self.of = of
        self.wrt = wrt
        self.active = active_values(nodes, of, wrt)
        self._contributions: dict[ir.Value, list[ir.Value]] = {}

    def add(self, value: ir.Value, cotangent: ir.Value) -> None:
        """Adds a contribution to the cotangent of a value."""
        self._contributions.setdefault(value, []).append(cotangent)

    def total(self, value: ir.Value) -> ir.Value | None:
        """Returns the sum of all contributions to the cotangent of a value, or None if there are none."""
        parts = self._contributions.get(value)
        if not parts:
            return None
        total = add_up(self.op, parts)
        # A sum is a new node, so shape inference has not seen it.
        total.shape = total.shape if len(parts) == 1 else value.shape
        self._contributions[value] = [total]
        return total

    def visit(self, node: ir.Node) -> None:
        """Applies a node's rule: turns cotangents of the outputs into contributions to cotangents of the inputs."""
        if not any(value in self._contributions for value in node.outputs):
            return
        # Its output has a cotangent if it is a seed, e.g. the next state of a loop.
        if is_stop_gradient(node):
            return
        if not any(value in self.active for value in (*node.inputs, *captured_values(node))):
            return
        # The names of gradient nodes contain the name of the forward node, for graph viewers and profiles.
        self.op.scope = f"grad/{node.name or node.op_type}/"
        rule = rule_for(node)
        if rule is None or isinstance(rule, NonDifferentiable):
            raise self._no_rule(node, "")
        view = NodeView(node, rule.signature, self.op.opset, self.active, self.of)
        ct = self._output_cotangents(node, rule)
        if ct is None:
            return
        self._save_outputs(node, rule)
        result = self._apply(rule, view, ct)
        captured = {value for value in captured_values(node) if value in self.active}
        # A control-flow rule also returns cotangents of values that the node's subgraphs read. These aren't inputs of
        # the node and have no schema names, so the values themselves are the keys.
        if isinstance(result, Mapping):
            of_captured = {key: value for key, value in result.items() if isinstance(key, ir.Value)}
            for primal, cotangent in of_captured.items():
                if cotangent is not None and primal in captured:
                    self._add_checked(node, primal, cotangent)
            captured -= of_captured.keys()
            result = {key: value for key, value in result.items() if not isinstance(key, ir.Value)}
        for index, cotangent in self._by_input(node, rule, result):
            self._contribute(node, rule, index, cotangent)
        self._check_complete(node, rule, captured)

    def _apply(self, rule: Rule, view: NodeView, ct: Any) -> Cotangents:
        """Calls the rule; if a shape is unknown because of a `not_yet` op, raises NoGradientRule for that op."""
        try:
            return rule.function(self.op, view, ct)
        except ShapeRequired as error:
            for value in view.node.inputs:
                producer = value.producer() if value is not None and value in self.active else None
                if producer is not None and reason_not_yet(producer):
                    raise self._no_rule(producer, "") from error
            raise

    def _output_cotangents(self, node: ir.Node, rule: Rule) -> ir.Value | tuple[ir.Value | None, ...] | None:
        """Returns the cotangents of a node's outputs in the form that the rule expects.

        Returns:
            A value if the rule receives one cotangent, otherwise a tuple, with None for outputs without a cotangent.
            None if none of the outputs has one.
        """
        names = [_parameter_name(rule.signature.outputs, i) for i in range(len(node.outputs))]
        for value, name in zip(node.outputs, names, strict=True):
            if value in self._contributions and value in self.active and name not in rule.outputs:
                raise self._no_rule(node, f" through its output {name!r}")
        # Inactive outputs are included: the rule identifies outputs by position.
        if rule.signature.variadic_output:
            return tuple(self.total(value) for value in node.outputs)
        by_name = {name: self.total(value) for value, name in zip(node.outputs, names, strict=True)}
        cts = tuple(by_name.get(name) for name in rule.outputs)
        if all(ct is None for ct in cts):
            return None
        return cts[0] if len(rule.outputs) == 1 else cts

    def _save_outputs(self, node: ir.Node, rule: Rule) -> None:
        """Adds the optional outputs that the rule reads to the forward node, e.g. the mask of a Dropout."""
        for name in rule.saves:
            index = rule.signature.outputs.index(name)
            if len(node.outputs) <= index:
                node.resize_outputs(index + 1)
            output = node.outputs[index]
            # An omitted output has an empty name.
            if not output.name:
                output.name = self.op.unique_name(f"{node.outputs[0].name}_{name}")
            # Rules read the dtype before shape inference runs again.
            if output.type is None and node.domain == "":
                output.type = self._type_of_output(node, index)

    def _type_of_output(self, node: ir.Node, index: int) -> ir.TensorType | None:
        """Returns the type of an output according to the op's schema; None if the schema does not determine it."""
        schema = schema_of(node.op_type, self.op.opset)
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        dtype = output_dtype(schema.outputs[index], schema, node.inputs, attributes)
        return None if dtype is None else ir.TensorType(dtype)

    def _by_input(self, node: ir.Node, rule: Rule, result: Cotangents) -> list[tuple[int, ir.Value]]:
        """Pairs the cotangents that a rule returned with indices of the node's inputs, e.g. [(0, ct_a), (1, ct_b)]."""
        if not isinstance(result, Mapping):
            parts: list[Any] = [result] if len(rule.wrt) == 1 else list(cast(Sequence[Any], result))
            result = dict(zip(rule.wrt, parts, strict=True))
        pairs: list[tuple[int, ir.Value]] = []
        for name, cotangent in result.items():
            first = rule.signature.inputs.index(name)
            if rule.signature.variadic_input and first == len(rule.signature.inputs) - 1:
                assert isinstance(cotangent, Sequence), f"{node.op_type}: a variadic input needs a sequence"
                pairs += [(first + i, ct) for i, ct in enumerate(cotangent) if ct is not None]
            elif cotangent is not None:
                pairs.append((first, cotangent))
        return pairs

    def _contribute(self, node: ir.Node, rule: Rule, index: int, cotangent: ir.Value) -> None:
        """Adds a cotangent to an active input, summed over broadcast axes if the rule requires it."""
        primal = node.inputs[index]
        if primal is None or primal not in self.active:
            return
        if rule.broadcasts:
            cotangent = sum_to_shape_of(self.op, cotangent, node.outputs[0], primal)
        self._add_checked(node, primal, cotangent)

    def _add_checked(self, node: ir.Node, primal: ir.Value, cotangent: ir.Value) -> None:
        """Adds a contribution after checking that its dtype matches the primal's."""
        # The cotangent of an integer is a float: straight-through rules pass it on to the quantizing op.
        straight_through = primal.dtype is not None and not primal.dtype.is_floating_point()
        if straight_through:
            self.add(primal, cotangent)
            return
        if primal.dtype is not None and cotangent.dtype is not None and primal.dtype != cotangent.dtype:
            raise DifferentiationError(
                f"differentiating {node.op_type} ({where(node)}): its rule returned a cotangent of dtype "
                f"{cotangent.dtype} for {primal.name!r} ({primal.dtype}); this is a bug in the rule, please report it"
            )
        # Shape inference has not run on new nodes; a cotangent has the shape of its primal.
        if cotangent.type is None:
            cotangent.type = primal.type
        if cotangent.shape is None:
            cotangent.shape = primal.shape
        self.add(primal, cotangent)

    def _check_complete(self, node: ir.Node, rule: Rule, captured: Collection[ir.Value]) -> None:
        """Raises NoGradientRule if the rule has no formula for an active input or a captured value."""
        # Without this check, the value would silently get no gradient.
        if captured:
            names = ", ".join(sorted(repr(value.name) for value in captured))
            raise self._no_rule(node, f" with respect to {names}, which its subgraphs read")
        for index, value in enumerate(node.inputs):
            name = _parameter_name(rule.signature.inputs, index)
            if value is not None and value in self.active and name not in rule.wrt:
                raise self._no_rule(node, f" with respect to its input {name!r}", value)

    def _no_rule(self, node: ir.Node, detail: str, value: ir.Value | None = None) -> NoGradientRule:
        """Returns the error for a missing rule, with the node's path to a leaf, the reason and a remedy.

        Args:
            node: the node without a rule.
            detail: text to insert after the op's name, e.g. " with respect to its input 'B'".
            value: input for which the rule has no formula, to find the reason; None if unknown.
        """
        domain = f"{node.domain}::" if node.domain else ""
        source = value.producer() if value is not None else None
        # If the node has no reason of its own, it may read integers from a `not_yet` op.
        reason = reason_not_yet(node) or (reason_not_yet(source) if source is not None else None)
        if reason is None and value is not None and value.dtype is not None and value.dtype.is_integer():
            reason = "its values are quantized: pass straight_through=True to ignore the rounding in the backward pass"
        again = ", override=True" if rule_for(node) is not None else ""
        call = f'("{node.domain}", "{node.op_type}", ...{again})'
        return NoGradientRule(
            f"no VJP rule for '{domain}{node.op_type}'{detail} ({where(node)}, "
            f"{path_to_leaf(node, self.of[0], self.wrt, self.active)}){': ' + reason if reason else ''}. "
            "Freeze all parameters before it, write it in standard ops, "
            f"onnxtrain.register_body{call}, or give it a gradient, onnxtrain.register_gradient{call}: see the guide "
            '"Use a custom op"'
        )


def _parameter_name(names: tuple[str, ...], index: int) -> str:
    """Returns the schema name of argument `index`; indices past the end belong to the last, variadic parameter."""
    return names[min(index, len(names) - 1)]
