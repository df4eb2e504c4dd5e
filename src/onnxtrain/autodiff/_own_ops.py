"""Registers gradients and bodies of users' ops: `onnxtrain.register_gradient` and `onnxtrain.register_body`.

Unlike :func:`vjp` and :func:`defbody`, which the rules of this package use, these functions also take onnxscript
functions, and check what a formula returns for each node.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.errors import RuleDefinitionError
from onnxtrain.op_bodies import MakeBody, note_own_gradient, register_own_body, register_shapes

from ._bodies import ShapeFunction, twin
from ._node import NodeView, Signature
from ._onnx_function import OnnxFunction, onnx_function
from ._own_cotangents import call_checked
from ._registry import Rule, add_rule, declared_rule, drop_rule, schema_signature, validate_rule

T = TypeVar("T")

Names = str | Sequence[str]
"""Names, as a list or separated by blanks, e.g. "X W B"."""

_RUNTIME_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})
# Signatures of users' bodies, for gradients that are registered for the same ops.
_SIGNATURES: dict[tuple[str, str], Signature] = {}


def register_gradient(
    domain: str,
    op_type: str,
    formula: Any = None,
    *,
    inputs: Names | None = None,
    outputs: Names | None = None,
    wrt: Names | None = None,
    attributes: Mapping[str, Any] | None = None,
    saves: Names = (),
    broadcasts: bool = False,
    shapes: str | ShapeFunction | None = None,
    override: bool = False,
) -> Any:
    """Registers the gradient of an op: a formula in ONNX ops for the cotangents of its inputs.

    The formula is one of

    - a Python function `(op, n, ct)`. It emits standard ops, e.g. `op.Mul(ct, n.X)`, and returns one cotangent per name
      in `wrt`: a value if there is one name, else a tuple or a mapping by name. `n.X` is an input, `n.out.Y` an output,
      `n.attr("alpha")` an attribute, and `ct` the cotangent of the output; for an op with several outputs, a tuple.
      None means that no gradient flows to an input;
    - an onnxscript function or an `onnx.FunctionProto`, called with the inputs of the op and then the cotangents of its
      outputs. It returns one cotangent per name in `wrt`. Attributes are passed on by name.

    A cotangent has the shape and dtype of its input. :func:`onnxtrain.check_op` compares the formula with finite
    differences. Inside of a `with onnxtrain.local_rules():` block, the gradient holds for that block only.

    Args:
        domain: domain of the op, e.g. "com.example"; "" for an op of the ONNX standard.
        op_type: name of the op, e.g. "Swish2".
        formula: the formula. Without it, the call returns a decorator.
        inputs: names of the op's inputs, e.g. "X" or ["X", "W"]. Default: those of the ONNX schema, of the gradient
            that is replaced, or of the op's registered body; ops without these need names.
        outputs: names of the outputs; see `inputs`.
        wrt: names of the inputs that have a gradient. Default: all.
        attributes: default of each attribute, None for no default. Default: `n.attr` returns None for attributes that
            a node lacks; those of standard ops have the defaults of the schema.
        saves: optional outputs of the node that the formula reads, e.g. "Mean".
        broadcasts: True if the cotangents have the output's shape, and are to be summed over broadcast axes.
        shapes: shapes and dtypes of the outputs, for an op without a registered body: the name of an input that all
            outputs resemble, or a function `(op, n)` that emits standard ops with the same output shapes. Default: the
            model declares them in its `value_info`.
        override: True to replace the gradient that an op has.

    Returns:
        The formula, or without `formula` a decorator.

    Raises:
        RuleDefinitionError: the op has a gradient already, its inputs are unknown, or a name is not among them.

    Example:
        >>> import numpy as np, onnx, onnxtrain
        >>> @onnxtrain.register_gradient("com.example", "Cube", inputs="X", outputs="Y")
        ... def cube(op, n, ct):
        ...     return op.Mul(ct, op.Mul(op.Mul(n.X, n.X), 3.0))
        >>> @onnxtrain.register_body("com.example", "Cube", inputs="X", outputs="Y")
        ... def cube_body(op, n):
        ...     return op.Mul(op.Mul(n.X, n.X), n.X)
        >>> [check.verdict for check in onnxtrain.check_op("com.example", "Cube", {"X": np.ones((2, 3), "float32")})]
        ['agrees']
    """
    # The empty domain has two spellings.
    domain = "" if domain == "ai.onnx" else domain

    def register(given: T) -> T:
        signature = _signature_for(domain, op_type, inputs, outputs, attributes)
        earlier = declared_rule(domain, op_type)
        of_outputs = signature.outputs
        if outputs is None and isinstance(earlier, Rule):
            of_outputs = earlier.outputs
        elif outputs is None and not domain:
            of_outputs = signature.outputs[:1]
        names = signature.inputs if wrt is None else _listed(wrt)
        function = onnx_function(given)
        if function is not None:
            _check_arity(domain, op_type, function, (*signature.inputs, *of_outputs), names)
            rule: Callable[..., Any] = functools.partial(_call_function, function, of_outputs)
        elif callable(given):
            rule = given
        else:
            raise RuleDefinitionError(
                f"registering the gradient of {_spelled(domain, op_type)}: the formula is a {type(given).__name__}; "
                "pass a function (op, n, ct), an onnxscript function or an onnx.FunctionProto"
            )
        entry = Rule(
            op_type,
            domain,
            names,
            of_outputs,
            functools.partial(call_checked, rule, names, of_outputs, signature, broadcasts),
            _listed(saves),
            broadcasts,
            signature,
            own=True,
        )
        validate_rule(entry)
        add_rule(entry, override)
        note_own_gradient((domain, op_type), True)
        if shapes is not None:
            like = _resembling(domain, op_type, shapes, signature) if isinstance(shapes, str) else shapes
            register_shapes((domain, op_type), functools.partial(twin, like, signature), local=True)
        return given

    return register if formula is None else register(formula)


def register_body(
    domain: str,
    op_type: str,
    body: Any = None,
    *,
    inputs: Names | None = None,
    outputs: Names | None = None,
    attributes: Mapping[str, Any] | None = None,
    has_kernel: bool | None = None,
    override: bool = False,
) -> Any:
    """Registers the body of an op: what it computes, in standard ONNX ops.

    Gradients flow through the body, unless the op has a gradient (:func:`register_gradient`), and its shapes are
    inferred from it. If ONNX Runtime has no kernel for the op, the body replaces it in all models that are written and
    run, exported ones too.

    Args:
        domain: domain of the op, e.g. "com.example".
        op_type: name of the op, e.g. "Swish2".
        body: a function `(op, n)` that emits standard ops, e.g. `op.Mul(n.X, op.Sigmoid(n.X))`, and returns the outputs
            in order; or an onnxscript function or `onnx.FunctionProto` that is called with the inputs. Without it, the
            call returns a decorator.
        inputs: names of the op's inputs, e.g. "X" or ["X", "W"]; those of an onnxscript function by default.
        outputs: names of its outputs.
        attributes: default of each attribute, None for no default. A node with another attribute is an error, because
            the body would ignore it.
        has_kernel: True if ONNX Runtime has a kernel for the op, e.g. from
            :func:`onnxtrain.register_custom_ops_library`. Exported models then keep the op. Default: False, but True
            for the ops of ONNX and `com.microsoft`.
        override: True to replace the body that an op has, and its gradient, so that gradients flow through the new
            body. It then replaces the op itself wherever a gradient flows; for another gradient of the same values, use
            :func:`onnxtrain.register_gradient`.

    Returns:
        The body, or without `body` a decorator.

    Raises:
        RuleDefinitionError: the op has a body or a gradient already, or its inputs are unknown.

    Example:
        >>> import onnx, onnxtrain
        >>> with onnxtrain.local_rules():
        ...     @onnxtrain.register_body("com.example", "Scale", inputs="X", outputs="Y", attributes={"by": 2.0})
        ...     def scale(op, n):
        ...         return op.Mul(n.X, n.attr("by"))
    """
    domain = "" if domain == "ai.onnx" else domain

    def register(given: T) -> T:
        function = onnx_function(given)
        if function is not None:
            signature = Signature(
                _listed(inputs) if inputs is not None else function.inputs,
                _listed(outputs) if outputs is not None else function.outputs,
                attributes=dict.fromkeys(function.attributes),
            )
            _check_arity(domain, op_type, function, signature.inputs, signature.outputs)
            function.refuse_calls_of(domain, op_type)
            make: MakeBody = functools.partial(function.body_of, signature)
        elif callable(given):
            signature = _signature_for(domain, op_type, inputs, outputs, attributes or {})
            make = functools.partial(twin, given, signature)
        else:
            raise RuleDefinitionError(
                f"registering the body of {_spelled(domain, op_type)}: received a {type(given).__name__}; pass a "
                "function (op, n), an onnxscript function or an onnx.FunctionProto"
            )
        rule = declared_rule(domain, op_type)
        if rule is not None and not override and not (isinstance(rule, Rule) and rule.own):
            raise RuleDefinitionError(
                f"registering the body of {_spelled(domain, op_type)}: it already has a gradient, which the body would "
                "not change. Pass override=True to differentiate the body instead"
            )
        runs = domain in _RUNTIME_DOMAINS if has_kernel is None else has_kernel
        if not register_own_body((domain, op_type), make, has_kernel=runs, override=override):
            raise RuleDefinitionError(
                f"registering the body of {_spelled(domain, op_type)}: it already has a body. Pass override=True to "
                "replace it, or register it inside `with onnxtrain.local_rules():` to replace it only there"
            )
        if override:
            drop_rule(domain, op_type)
            note_own_gradient((domain, op_type), False)
        _SIGNATURES[domain, op_type] = signature
        return given

    return register if body is None else register(body)


def op_signature(domain: str, op_type: str) -> Signature:
    """Returns the names of an op's inputs and outputs: from its gradient, its body or its ONNX schema.

    Raises:
        RuleDefinitionError: the op has none of these.
    """
    return _signature_for("" if domain == "ai.onnx" else domain, op_type, None, None, None)


def _signature_for(
    domain: str,
    op_type: str,
    inputs: Names | None,
    outputs: Names | None,
    attributes: Mapping[str, Any] | None,
) -> Signature:
    """Returns an op's signature: the given names, else those of its gradient, its body, or its ONNX schema.

    Raises:
        RuleDefinitionError: there are none.
    """
    if inputs is not None and outputs is not None:
        return Signature(_listed(inputs), _listed(outputs), attributes=attributes)
    rule = declared_rule(domain, op_type)
    known = rule.signature if isinstance(rule, Rule) else _SIGNATURES.get((domain, op_type))
    if known is None and not domain:
        known = schema_signature(op_type, domain)
    if known is None:
        raise RuleDefinitionError(
            f"registering {_spelled(domain, op_type)}: ONNX knows no such op, so its inputs have no names; pass "
            'them, e.g. inputs="X W", outputs="Y"'
        )
    return Signature(
        known.inputs if inputs is None else _listed(inputs),
        known.outputs if outputs is None else _listed(outputs),
        known.variadic_input and inputs is None,
        known.variadic_output and outputs is None,
        known.attributes if attributes is None else attributes,
    )


def _listed(names: Names) -> tuple[str, ...]:
    return tuple(names.split()) if isinstance(names, str) else tuple(names)


def _spelled(domain: str, op_type: str) -> str:
    return f"{domain}::{op_type}" if domain else op_type


def _check_arity(
    domain: str, op_type: str, function: OnnxFunction, inputs: Sequence[str], outputs: Sequence[str]
) -> None:
    """Raises RuleDefinitionError unless an ONNX function has as many inputs and outputs as needed."""
    for kind, has, needs in (("inputs", function.inputs, inputs), ("outputs", function.outputs, outputs)):
        if len(has) != len(needs):
            raise RuleDefinitionError(
                f"registering {_spelled(domain, op_type)}: the function {function.name} has {len(has)} {kind} "
                f"({', '.join(has)}), but needs {len(needs)}: {', '.join(needs)}"
            )


def _resembling(domain: str, op_type: str, name: str, signature: Signature) -> ShapeFunction:
    """Returns a function whose results have the shape and dtype of the input `name`, one per output."""
    if name not in signature.inputs:
        raise RuleDefinitionError(
            f"registering {_spelled(domain, op_type)}: shapes={name!r} is not an input; its inputs are "
            f"{', '.join(signature.inputs)}"
        )
    return lambda op, n: [op.Identity(getattr(n, name)) for _ in signature.outputs]


def _call_function(
    function: OnnxFunction, of_outputs: Sequence[str], op: Emitter, n: NodeView, ct: Any
) -> Sequence[ir.Value]:
    """Emits the cotangents by an ONNX function of the inputs and the cotangents of the outputs."""
    cts = [ct] if len(of_outputs) == 1 else list(ct)
    given = [*n.inputs, *[None] * (len(function.inputs) - len(n.inputs) - len(cts)), *cts]
    model = function.graph_for(given, n.node.attributes, op.opset)
    return op.copy_of(model.graph, [value for value in given if value is not None])
