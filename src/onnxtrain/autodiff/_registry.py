"""The rule table: one VJP rule per op, validated against the ONNX schemas when it is registered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.emitter import Emitter, schema_of
from onnxtrain.errors import GraphBuildError, RuleDefinitionError

from ._node import NodeView, Signature

__all__ = [
    "NON_DIFFERENTIABLE",
    "NOT_YET",
    "OPSETS",
    "RULES",
    "Cotangents",
    "NonDifferentiable",
    "Rule",
    "defvjp",
    "nondifferentiable",
    "not_yet",
    "reason_not_yet",
    "rule_for",
    "vjp",
]

OPSETS = range(21, 27)
"""Versions of the standard domain that rules are written for."""

Cotangents = ir.Value | None | Sequence[ir.Value | None] | Mapping[str, ir.Value | None]
RuleFunction = Callable[[Emitter, NodeView, Any], Cotangents]
ArgumentRule = Callable[[Emitter, NodeView, Any], ir.Value | None]


@dataclass(frozen=True)
class Rule:
    """How cotangents of a node's outputs become cotangents of its inputs.

    Attributes:
        op_type: name of the op; `domain` its domain ("" is the standard one).
        wrt: schema names of the inputs that can have a cotangent. A variadic input stands for all its arguments.
        outputs: schema names of the outputs whose cotangents the rule takes. With one name `ct` is a value,
            otherwise a tuple with None for outputs that nothing needs. A variadic output stands for all of them.
        function: the rule itself, called with (emitter, node view, ct).
        saves: optional outputs of the forward node that the rule reads.
        broadcasts: whether the returned cotangents have the output's shape and must be summed to the inputs' shapes.
        signature: the op's input and output names.
    """

    op_type: str
    domain: str
    wrt: tuple[str, ...]
    outputs: tuple[str, ...]
    function: RuleFunction
    saves: tuple[str, ...]
    broadcasts: bool
    signature: Signature


@dataclass(frozen=True)
class NonDifferentiable:
    """An op through which no gradient flows, and why."""

    op_type: str
    reason: str


RULES: dict[tuple[str, str], Rule] = {}
NON_DIFFERENTIABLE: dict[tuple[str, str], NonDifferentiable] = {}
NOT_YET: dict[tuple[str, str], str] = {}


def vjp(
    op_type: str,
    *,
    wrt: Sequence[str],
    outputs: Sequence[str] | None = None,
    saves: Sequence[str] = (),
    broadcasts: bool = False,
    domain: str = "",
    signature: Signature | None = None,
) -> Callable[[RuleFunction], RuleFunction]:
    """Registers the decorated function as the rule of `op_type`.

    The function gets `(op, n, ct)` and returns the cotangents of the inputs named in `wrt`: one value when `wrt` has
    one name, otherwise a tuple in that order or a mapping by name; None where there is none. For a variadic input
    it returns a sequence with one entry per argument.

    Args:
        op_type: name of the op.
        wrt: names of the inputs that can have a cotangent.
        outputs: names of the outputs whose cotangents the rule takes; by default the first one.
        saves: optional outputs of the forward node that the rule reads.
        broadcasts: whether the cotangents have the output's shape and must be summed to the inputs' shapes.
        domain: of the op.
        signature: for ops outside the standard domain, their input and output names.

    Raises:
        RuleDefinitionError: the op has a rule already, or a name is not in its schema.
    """

    def register(function: RuleFunction) -> RuleFunction:
        known = signature or _schema_signature(op_type, domain)
        rule = Rule(
            op_type,
            domain,
            tuple(wrt),
            tuple(outputs) if outputs is not None else (known.outputs[0],),
            function,
            tuple(saves),
            broadcasts,
            known,
        )
        _validate(rule)
        RULES[domain, op_type] = rule
        return function

    return register


def defvjp(
    op_type: str, *, broadcasts: bool = False, saves: Sequence[str] = (), **by_input: ArgumentRule
) -> None:
    """Registers the rule of `op_type` as one formula `(op, n, ct) -> cotangent` per differentiable input."""

    def function(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
        return {name: formula(op, n, ct) if n.needs(name) else None for name, formula in by_input.items()}

    vjp(op_type, wrt=tuple(by_input), saves=saves, broadcasts=broadcasts)(function)


def nondifferentiable(*op_types: str, reason: str, domain: str = "") -> None:
    """Declares ops through which no gradient flows (piecewise constant, integer or shape results)."""
    for op_type in op_types:
        _refuse_duplicate(op_type, domain)
        if not domain:
            _schema_signature(op_type, domain)
        NON_DIFFERENTIABLE[domain, op_type] = NonDifferentiable(op_type, reason)


def not_yet(*op_types: str, reason: str) -> None:
    """Declares ops that are differentiable but have no rule yet, with the reason."""
    for op_type in op_types:
        _refuse_duplicate(op_type, "")
        _schema_signature(op_type, "")
        NOT_YET["", op_type] = reason


def rule_for(node: ir.Node) -> Rule | NonDifferentiable | None:
    """Returns the rule of a node's op, its declaration as non-differentiable, or None."""
    key = (node.domain if node.domain != "ai.onnx" else "", node.op_type)
    return RULES.get(key) or NON_DIFFERENTIABLE.get(key)


def reason_not_yet(node: ir.Node) -> str | None:
    """Returns why a node's op has no rule yet, None where it was not declared so."""
    return NOT_YET.get((node.domain if node.domain != "ai.onnx" else "", node.op_type))


def _schema_signature(op_type: str, domain: str) -> Signature:
    """Input and output names, which must be the same at every supported opset that has the op."""
    signatures = []
    for opset in OPSETS:
        try:
            schema = schema_of(op_type, opset, domain)
        except GraphBuildError:
            continue
        if not schema.deprecated:
            signatures.append(_signature_of(schema))
    if not signatures:
        raise RuleDefinitionError(f"registering {domain or 'ai.onnx'}::{op_type}: no such op in opsets 21-26")
    return signatures[-1]


def _signature_of(schema: onnx.defs.OpSchema) -> Signature:
    variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
    return Signature(
        tuple(formal.name for formal in schema.inputs),
        tuple(formal.name for formal in schema.outputs),
        bool(schema.inputs) and schema.inputs[-1].option == variadic,
        bool(schema.outputs) and schema.outputs[-1].option == variadic,
    )


def _refuse_duplicate(op_type: str, domain: str) -> None:
    key = (domain, op_type)
    if key in RULES or key in NON_DIFFERENTIABLE or key in NOT_YET:
        raise RuleDefinitionError(f"registering {domain or 'ai.onnx'}::{op_type}: it is registered already")


def _validate(rule: Rule) -> None:
    _refuse_duplicate(rule.op_type, rule.domain)
    for kind, names, known in (
        ("input", rule.wrt, rule.signature.inputs),
        ("output", (*rule.outputs, *rule.saves), rule.signature.outputs),
    ):
        for name in names:
            if name not in known:
                raise RuleDefinitionError(
                    f"registering the rule of {rule.op_type}: it has no {kind} {name!r}; its {kind}s are {known}"
                )
