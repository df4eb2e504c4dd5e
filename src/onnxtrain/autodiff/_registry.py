"""Defines the table of VJP rules: one per op, validated against the op's ONNX schema at registration.

The table is open. A program can add rules for ops of any domain and for `not_yet` ops, replace a rule with
`override=True`, or replace a rule temporarily inside a `with local_rules():` block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.emitter import Emitter, schema_of
from onnxtrain.errors import GraphBuildError, RuleDefinitionError
from onnxtrain.op_bodies import local_bodies, register_shapes
from onnxtrain.op_facts import STEPS

from ._bodies import ShapeFunction, twin
from ._node import NodeView, Signature

OPSETS = range(21, 27)
"""Versions of the standard domain that the rules support."""

# Prefixes of the type names that can have cotangents. Sequences and optionals may contain floats.
_FLOATING = ("tensor(float)", "tensor(float16)", "tensor(double)", "tensor(bfloat16)", "seq", "optional")

Cotangents = ir.Value | None | Sequence[ir.Value | None] | Mapping[Any, ir.Value | None]
RuleFunction = Callable[[Emitter, NodeView, Any], Cotangents]
ArgumentRule = Callable[[Emitter, NodeView, Any], ir.Value | None]


@dataclass(frozen=True)
class Rule:
    """VJP rule of an op: turns the cotangents of a node's outputs into cotangents of its inputs.

    Attributes:
        op_type: name of the op, e.g. "Mul".
        domain: domain of the op; "" is the standard domain.
        wrt: schema names of the inputs that can have a cotangent, e.g. ("A", "B"). A variadic input stands for all its
            arguments.
        outputs: schema names of the outputs whose cotangents the rule receives, e.g. ("C",). With one name, `ct` is a
            value, otherwise a tuple with None for outputs without a cotangent. A variadic output stands for all its
            values.
        function: the rule itself, called with (emitter, node view, ct).
        saves: optional outputs of the forward node that the rule reads, e.g. ("Mean", "InvStdDev").
        broadcasts: True if the rule's cotangents have the output's shape, and the driver must sum them to the inputs'
            shapes.
        signature: names of the op's inputs and outputs.
        straight_through: True if integer inputs and outputs have (floating-point) cotangents; or a function
            `(node) -> bool` that decides this for each node.
        own: True if a user registered it by `onnxtrain.register_gradient`.
    """

    op_type: str
    domain: str
    wrt: tuple[str, ...]
    outputs: tuple[str, ...]
    function: RuleFunction
    saves: tuple[str, ...]
    broadcasts: bool
    signature: Signature
    straight_through: bool | Callable[[ir.Node], bool] = False
    own: bool = False


@dataclass(frozen=True)
class NonDifferentiable:
    """An op through which no gradient flows.

    Attributes:
        op_type: name of the op, e.g. "Shape".
        reason: why its derivative is zero or undefined, for `onnxtrain ops` and docs/reference/ops.md.
    """

    op_type: str
    reason: str


RULES: dict[tuple[str, str], Rule] = {}
NON_DIFFERENTIABLE: dict[tuple[str, str], NonDifferentiable] = {}
NOT_YET: dict[tuple[str, str], str] = {}

_ORIGIN = "onnxtrain.origin"

STEPS_OF_GRADIENTS: Mapping[str, Mapping[str, str]] = {op_type: {_ORIGIN: "gradient"} for op_type in STEPS}
"""Metadata, by op type, of piecewise constant nodes that rules emit; :func:`rule_for` treats them as constants.

Straight-through rules apply to rounding in the user's model. If a gradient is differentiated again, rounding that a
rule emitted, such as the Floor in GridSample's gradient, must keep its derivative of zero.
"""

# A context variable, so that local rules are invisible to other threads and tasks that differentiate at the same time.
# None stands for an op that has no rule in the block, because its body is differentiated.
_LOCAL: ContextVar[tuple[dict[tuple[str, str], Rule | None], ...]] = ContextVar(
    "onnxtrain local rules", default=()
)


@contextmanager
def local_rules() -> Iterator[None]:
    """Makes gradients registered inside a `with` block local to it; they take precedence over existing ones.

    The same holds for bodies of :func:`onnxtrain.register_body`.

    Example:
        >>> from onnxtrain.autodiff import differentiate, local_rules, vjp
        >>> import onnx, onnxruntime, numpy as np
        >>> model = onnx.parser.parse_model('''
        ...   <ir_version: 10, opset_import: ["": 21]>
        ...   g (float[n] x) => (float y) { r = Round(x)  y = ReduceSum<keepdims=0>(r) }''')
        >>> with local_rules():
        ...     straight = vjp("Round", wrt=("X",))(lambda op, n, ct: ct)
        ...     step = differentiate(model, of="y", wrt=["x"])
        >>> session = onnxruntime.InferenceSession(step.SerializeToString())
        >>> session.run(["x_grad"], {"x": np.array([0.4, 1.7], np.float32)})[0].tolist()
        [1.0, 1.0]
    """
    token = _LOCAL.set((*_LOCAL.get(), {}))
    try:
        with local_bodies():
            yield
    finally:
        _LOCAL.reset(token)


def vjp(
    op_type: str,
    *,
    wrt: Sequence[str],
    outputs: Sequence[str] | None = None,
    saves: Sequence[str] = (),
    broadcasts: bool = False,
    domain: str = "",
    signature: Signature | None = None,
    straight_through: bool | Callable[[ir.Node], bool] = False,
    override: bool = False,
    shapes: ShapeFunction | None = None,
) -> Callable[[RuleFunction], RuleFunction]:
    """Registers the decorated function as the VJP rule of `op_type`.

    The function is called with `(op, n, ct)` and returns the cotangents of the inputs in `wrt`: a single value if `wrt`
    has one name, otherwise a tuple in the same order or a mapping by name. None means no cotangent. For a variadic
    input, the cotangent is a sequence with one entry per argument. For a control-flow node, the mapping may also
    contain cotangents of outer values that a subgraph captures, with the values themselves as keys.

    Args:
        op_type: name of the op.
        wrt: names of the inputs that can have a cotangent.
        outputs: names of the outputs whose cotangents are passed to the rule. Default: the first output.
        saves: optional outputs of the forward node that the rule reads.
        broadcasts: True if the rule's cotangents have the output's shape and must be summed to the inputs' shapes.
        domain: domain of the op, e.g. "com.microsoft".
        signature: for nonstandard ops, the names of inputs and outputs.
        straight_through: True if integer inputs or outputs of the op have floating-point cotangents, e.g. in rules for
            quantization; or a function `(node) -> bool` that decides this per node.
        override: True replaces an existing rule or a `nondifferentiable` declaration. A `not_yet` op needs no override.
        shapes: for nonstandard ops, a function that is called with `(op, n)`, emits standard ops with outputs of the
            same shapes and dtypes, and returns these outputs. Shape inference uses them; they never run. The function
            remains registered after a :func:`local_rules` block ends.

    Raises:
        RuleDefinitionError: the op already has a rule, a name is not in its schema, or its outputs are integers and
            `straight_through` is False.
    """

    def register(function: RuleFunction) -> RuleFunction:
        op_signature = signature or schema_signature(op_type, domain)
        rule = Rule(
            op_type,
            domain,
            tuple(wrt),
            tuple(outputs) if outputs is not None else (op_signature.outputs[0],),
            function,
            tuple(saves),
            broadcasts,
            op_signature,
            straight_through,
        )
        validate_rule(rule)
        add_rule(rule, override)
        # Kept when local rules end: shape inference must still work for models that were built with them.
        if shapes is not None:
            register_shapes((domain, op_type), functools.partial(twin, shapes, op_signature))
        return function

    return register


def defvjp(
    op_type: str,
    *,
    broadcasts: bool = False,
    saves: Sequence[str] = (),
    override: bool = False,
    **by_input: ArgumentRule,
) -> None:
    """Registers the rule of `op_type` as one formula `(op, n, ct) -> cotangent` per differentiable input."""

    def function(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
        # Formulas of inputs that need no cotangent are skipped: their nodes would be dead.
        return {name: formula(op, n, ct) if n.needs(name) else None for name, formula in by_input.items()}

    vjp(op_type, wrt=tuple(by_input), saves=saves, broadcasts=broadcasts, override=override)(function)


def nondifferentiable(*op_types: str, reason: str, domain: str = "") -> None:
    """Declares ops through which no gradient flows: their outputs are piecewise constant, integers or shapes."""
    for op_type in op_types:
        _check_declarable(op_type, domain)
        NOT_YET.pop((domain, op_type), None)
        NON_DIFFERENTIABLE[domain, op_type] = NonDifferentiable(op_type, reason)


def not_yet(*op_types: str, reason: str, domain: str = "") -> None:
    """Declares ops that are differentiable but have no rule yet; error messages state the `reason`."""
    for op_type in op_types:
        _check_declarable(op_type, domain)
        NOT_YET[domain, op_type] = reason


def rule_for(node: ir.Node) -> Rule | NonDifferentiable | None:
    """Returns the rule of a node's op or its `nondifferentiable` declaration; None if it has neither."""
    key = _key(node)
    if _is_step_of_gradient(node):
        return NonDifferentiable(
            node.op_type, "it is a piecewise constant part of a gradient: its derivative is zero"
        )
    return declared_rule(*key)


def declared_rule(domain: str, op_type: str) -> Rule | NonDifferentiable | None:
    """Returns the rule of an op or its `nondifferentiable` declaration; None if it has neither."""
    key = (domain, op_type)
    # Local rules come first, so that they can replace global rules and declarations.
    layer = _local_layer(key)
    return layer[key] if layer is not None else RULES.get(key) or NON_DIFFERENTIABLE.get(key)


def reason_not_yet(node: ir.Node) -> str | None:
    """Returns the reason given to `not_yet` for a node's op; None if the op is not declared `not_yet`."""
    key = _key(node)
    return None if _local_layer(key) is not None or _is_step_of_gradient(node) else NOT_YET.get(key)


def is_straight_through(output: ir.Value) -> bool:
    """True if a straight-through rule receives the cotangent of `output`, which may be an integer tensor."""
    node = output.producer()
    rule = rule_for(node) if node is not None else None
    if node is None or not isinstance(rule, Rule):
        return False
    applies = rule.straight_through
    if not (applies(node) if callable(applies) else applies):
        return False
    names = rule.signature.outputs
    return names[min(output.index() or 0, len(names) - 1)] in rule.outputs


def _is_step_of_gradient(node: ir.Node) -> bool:
    """True for piecewise constant nodes that a gradient rule emitted, e.g. Floor: no gradient flows through them.

    If a gradient is differentiated again, straight-through rules must not apply to these nodes.
    """
    return _ORIGIN in node.metadata_props and node.op_type in STEPS_OF_GRADIENTS


def _local_layer(key: tuple[str, str]) -> dict[tuple[str, str], Rule | None] | None:
    """Returns the rules of the innermost `local_rules` block that has an entry for this key, or None."""
    return next((layer for layer in reversed(_LOCAL.get()) if key in layer), None)


def _key(node: ir.Node) -> tuple[str, str]:
    """Returns the key of a node in the tables, (domain, op type), with "ai.onnx" normalized to ""."""
    return (node.domain if node.domain != "ai.onnx" else "", node.op_type)


def schemas_by_opset(op_type: str, domain: str = "", opsets: range = OPSETS) -> dict[int, onnx.defs.OpSchema]:
    """Returns the op's schema at each opset in `opsets` that has the op and does not deprecate it."""
    schemas = {}
    for opset in opsets:
        try:
            schema = schema_of(op_type, opset, domain)
        except GraphBuildError:
            continue
        if not schema.deprecated:
            schemas[opset] = schema
    return schemas


def _newest_schema(op_type: str, domain: str) -> onnx.defs.OpSchema | None:
    """Returns the op's schema at the newest supported opset that has the op and does not deprecate it, or None."""
    # One after the other: all schemas of all ops take 10 MB.
    by_opset = (schemas_by_opset(op_type, domain, range(opset, opset + 1)) for opset in reversed(OPSETS))
    return next((schema for schemas in by_opset for schema in schemas.values()), None)


def schema_signature(op_type: str, domain: str) -> Signature:
    """Returns the op's input and output names at the newest supported opset that has the op.

    Raises:
        RuleDefinitionError: no supported opset has the op.
    """
    schema = _newest_schema(op_type, domain)
    if schema is None:
        raise RuleDefinitionError(f"registering {domain or 'ai.onnx'}::{op_type}: no such op in opsets 21-26")
    variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
    return Signature(
        tuple(formal.name for formal in schema.inputs),
        tuple(formal.name for formal in schema.outputs),
        bool(schema.inputs) and schema.inputs[-1].option == variadic,
        bool(schema.outputs) and schema.outputs[-1].option == variadic,
    )


def _check_declarable(op_type: str, domain: str) -> None:
    """Raises RuleDefinitionError if an op cannot be declared `nondifferentiable` or `not_yet`.

    An op cannot be declared if it already has a rule, is already declared `nondifferentiable`, or is a standard op that
    no supported opset has. Ops of other domains are accepted under any name.
    """
    _check_not_declared(op_type, domain)
    # Other domains have no schemas to check the name against.
    if not domain:
        schema_signature(op_type, domain)


def _check_not_declared(op_type: str, domain: str) -> None:
    """Raises RuleDefinitionError if an op already has a rule or is declared `nondifferentiable`."""
    key = (domain, op_type)
    if key in RULES or key in NON_DIFFERENTIABLE:
        kind = "already has a rule" if key in RULES else "is already declared nondifferentiable"
        raise RuleDefinitionError(
            f"registering {domain or 'ai.onnx'}::{op_type}: it {kind}. Pass override=True to replace it, or "
            "register the rule inside `with onnxtrain.local_rules():` to replace it only there"
        )


def add_rule(rule: Rule, override: bool) -> None:
    """Adds a rule to the innermost `local_rules` block, or to the global table outside any block.

    Raises:
        RuleDefinitionError: `override` is False, and the block or table already has a rule for the op, or (only outside
            any block) the op is declared `nondifferentiable`.
    """
    key = (rule.domain, rule.op_type)
    # Inside `with local_rules():`, the global tables don't change.
    layers = _LOCAL.get()
    if not layers:
        if not override:
            _check_not_declared(rule.op_type, rule.domain)
        NON_DIFFERENTIABLE.pop(key, None)
        NOT_YET.pop(key, None)
        RULES[key] = rule
        return
    if layers[-1].get(key) is not None and not override:
        raise RuleDefinitionError(
            f"registering {rule.domain or 'ai.onnx'}::{rule.op_type}: the local_rules() block has already "
            "registered a rule for this op"
        )
    layers[-1][key] = rule


def drop_rule(domain: str, op_type: str) -> None:
    """Removes the rule or declaration of an op, in the innermost `local_rules` block if there is one."""
    key = (domain, op_type)
    layers = _LOCAL.get()
    if layers:
        layers[-1][key] = None
        return
    for table in (RULES, NON_DIFFERENTIABLE, NOT_YET):
        table.pop(key, None)


def validate_rule(rule: Rule) -> None:
    """Raises RuleDefinitionError for names not in the schema, and for integer outputs without `straight_through`."""
    for kind, names, schema_names in (
        ("input", rule.wrt, rule.signature.inputs),
        ("output", (*rule.outputs, *rule.saves), rule.signature.outputs),
    ):
        for name in names:
            if name not in schema_names:
                raise RuleDefinitionError(
                    f"registering the rule of {rule.op_type}: it has no {kind} {name!r}; its {kind}s are {schema_names}"
                )
    if not rule.straight_through and not rule.domain and _gives_integers(rule):
        raise RuleDefinitionError(
            f"registering the rule of {rule.op_type}: its outputs are integers, which have no cotangents unless "
            "straight_through=True"
        )


def _gives_integers(rule: Rule) -> bool:
    """True if the schema allows only non-floating-point types for the outputs whose cotangents the rule receives."""
    schema = schema_of(rule.op_type, OPSETS[-1])
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    types = {
        type_
        for formal in schema.outputs
        if formal.name in rule.outputs
        for type_ in allowed.get(formal.type_str, [formal.type_str])
    }
    return bool(types) and not any(type_.startswith(_FLOATING) for type_ in types)
