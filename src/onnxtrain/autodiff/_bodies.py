"""Registers bodies of nonstandard ops: equivalents in standard ops, for gradients and shape inference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.errors import NoGradientRule
from onnxtrain.op_bodies import register_body

from ._node import NodeView, Signature, where

ShapeFunction = Callable[[Emitter, NodeView], ir.Value | Sequence[ir.Value]]


def defbody(
    op_type: str, domain: str, inputs: str, outputs: str, **attributes: Any
) -> Callable[[ShapeFunction], ShapeFunction]:
    """Registers the decorated function as the body of a nonstandard op: an equivalent built from standard ops.

    The function is called with `(op, n)` and returns the outputs in order; it may omit trailing outputs. If a gradient
    flows through the op and the op has no rule, its body replaces it. Otherwise, the op remains in the model, and the
    body is only used for shape inference.

    Args:
        op_type: name of the op.
        domain: domain of the op, e.g. "com.microsoft".
        inputs: names of the inputs, separated by spaces, e.g. "X W B".
        outputs: names of the outputs, separated by spaces.
        attributes: default of each attribute, by name; None for no default. A node with an undeclared attribute raises
            an error, because the body would ignore that attribute.
    """
    signature = Signature(tuple(inputs.split()), tuple(outputs.split()), attributes=attributes)

    def register(function: ShapeFunction) -> ShapeFunction:
        register_body((domain, op_type), functools.partial(twin, function, signature))
        return function

    return register


def twin(
    shapes: ShapeFunction,
    signature: Signature,
    node: ir.Node,
    opset: int,
    functions: dict[ir.OperatorIdentifier, ir.Function] | None = None,
) -> ir.Function:
    """Returns the ONNX function of standard ops that stands in for a nonstandard node.

    If `shapes` is the body of an op (:func:`defbody`), the function computes the same outputs as the node, and replaces
    it if a gradient flows through it. Otherwise, only shapes and dtypes are the same, for shape inference.

    Args:
        shapes: emits the standard ops and returns the outputs.
        signature: names of the op's inputs, outputs and attributes.
        node: the node.
        opset: version of the standard domain.
        functions: function table of a model. If given, `shapes` may call composite ops, whose functions are added to
            the table.

    Raises:
        NoGradientRule: the node has an attribute that the signature does not declare.
    """
    undeclared = [] if signature.attributes is None else sorted(node.attributes.keys() - signature.attributes)
    if undeclared:
        raise NoGradientRule(
            f"differentiating {node.domain or 'ai.onnx'}.{node.op_type} ({where(node)}): its body does not support the "
            f"attribute {', '.join(map(repr, undeclared))}. Freeze all parameters before it, or add it to "
            "the attributes of its body (see the guide 'Use a custom op')"
        )
    names = [value.name if value is not None else None for value in node.inputs]
    inputs = [
        # Error messages show the names of the node's inputs, but a function needs distinct names.
        ir.Value(
            name=name if name and names.index(name) == index else f"in{index}",
            type=value.type if value else None,
            shape=value.shape if value else None,
        )
        for index, (name, value) in enumerate(zip(names, node.inputs, strict=True))
    ]
    # An omitted input remains an input of the function, so that positions match, but the copied node must not read it.
    present = [copy if value is not None else None for copy, value in zip(inputs, node.inputs, strict=True)]
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": opset}, name="twin")
    attributes = list(node.attributes.values())
    outputs = [ir.Value(name=output.name) for output in node.outputs]
    # A copy outside of any graph, for `shapes` to inspect: its inputs are the function's.
    outside = ir.Node(node.domain, node.op_type, present, attributes, outputs=outputs, name=node.name)
    result = shapes(
        Emitter(graph, functions=functions, in_function=True),
        NodeView(outside, signature, opset, frozenset()),
    )
    results = [result] if isinstance(result, ir.Value) else list(result)
    graph.outputs.extend(results)
    return ir.Function("onnxtrain.twin", node.op_type, graph=graph, attributes=[])
