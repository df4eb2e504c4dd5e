"""Expand ops into function bodies: of their schemas, or those that `BODIES` has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.passes.canonical.inline_functions import inline_functions
from onnxtrain.passes.canonical.unknown_ops import BODIES
from onnxtrain.passes.shapes.infer import infer_shapes, settle_shapes
from onnxtrain.passes.tidy.constants import lift_constants

_DOMAIN = "onnxtrain.schema"


def has_schema_function(op_type: str, opset: int) -> bool:
    """Return whether the standard op `op_type` of `opset` is defined by a function body."""
    try:
        schema = _schema(op_type, opset)
    except onnx.defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def _schema(op_type: str, opset: int) -> Any:
    # The type stubs of onnx lack the members about functions.
    return onnx.defs.get_schema(op_type, opset, "")


def inline_schema_functions(model: ir.Model, keep: Callable[[ir.Node], bool]) -> ir.Model:
    """Return a model without ops that have a function body, except those that `keep`; `model` is not changed.

    Expansion is repeated until nothing is left to expand, also in subgraphs. An op stays where its body
    cannot be built: it has a graph attribute, or the body depends on input types that are not known.

    Args:
        model: A model of the canonical opset without model-local functions.
        keep: Asked for each node that has a function body.
    """
    model = model.clone()
    # Bodies that depend on the types of inputs need these; each round's bodies have none yet.
    while True:
        expandable = list(_expandable(model, keep))
        if not expandable:
            return model
        infer_shapes(model)
        opset = model.graph.opset_imports[""]
        schemas = [node for node in expandable if (node.domain, node.op_type) not in BODIES]
        made = [
            (node, make(node, opset))
            for node in expandable
            if (make := BODIES.get((node.domain, node.op_type))) is not None
        ]
        for index, (node, function) in enumerate(made):
            _call_body(model, node, function, index)
        bodies = [(node, body) for node in schemas if (body := _function_body(node, model)) is not None]
        if not bodies and not made:
            return model
        for index, (node, body) in enumerate(bodies):
            _turn_into_call(model, node, body, index)
        model = inline_functions(model, lambda function: function.domain == _DOMAIN)
        model.graph.opset_imports.pop(_DOMAIN, None)
        settle_shapes(lift_constants(model))


def _expandable(model: ir.Model, keep: Callable[[ir.Node], bool]) -> Iterator[ir.Node]:
    opset = model.graph.opset_imports[""]
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if (node.domain, node.op_type) not in BODIES and (
            node.domain != "" or not has_schema_function(node.op_type, opset)
        ):
            continue
        if any(
            attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
            for attr in node.attributes.values()
        ):
            continue
        if not keep(node):
            yield node


def _call_body(model: ir.Model, node: ir.Node, function: ir.Function, index: int) -> None:
    """Make `node` a call of a function that was made for it."""
    function.domain, function.name = _DOMAIN, f"{node.op_type}_body_{index}"
    _prefix_names(function, node)
    model.functions[function.identifier()] = function
    node.domain, node.op_type = function.domain, function.name
    node.attributes.clear()


def _prefix_names(function: ir.Function, node: ir.Node) -> None:
    prefix = node.name or node.outputs[0].name or node.op_type
    for inner in function.all_nodes():
        inner.name = f"{prefix}/{inner.name or inner.op_type}"
        for output in inner.outputs:
            if output.name:
                output.name = f"{prefix}/{output.name}"


def _function_body(node: ir.Node, model: ir.Model) -> onnx.FunctionProto | None:
    """Return the body of `node`, or None where the types of its inputs do not determine one."""
    opset = model.graph.opset_imports[""]
    schema = _schema(node.op_type, opset)
    if schema.has_function:
        body = schema.get_function_with_opset_version(opset)
    else:
        types = [b"" if value is None else _type_proto(value) for value in node.inputs]
        if any(value is not None and not data for value, data in zip(node.inputs, types, strict=True)):
            return None
        versions = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
        call = ir.to_proto(node)
        # A body defines the outputs that have a name; those before the last one must all be there.
        for index, name in enumerate(call.output):
            call.output[index] = name or f"unused_{index}"
        body = schema.get_context_dependent_function_with_opset_version(
            max(versions, default=schema.since_version), call.SerializeToString(), types
        )
    function = onnx.FunctionProto()
    function.ParseFromString(body)
    del function.output[len(node.outputs) :]
    return function if function.node else None


def _type_proto(value: ir.Value) -> bytes:
    if value.type is None:
        return b""
    return bytes(ir.serde.serialize_value(value).type.SerializeToString())


def _turn_into_call(model: ir.Model, node: ir.Node, body: onnx.FunctionProto, index: int) -> None:
    """Make `node` a call of a model-local function with this body; InlinePass does the rest."""
    opset = model.graph.opset_imports[""]
    schema = _schema(node.op_type, opset)
    for name, attribute in schema.attributes.items():
        if name not in node.attributes and attribute.default_value.name:
            node.attributes.add(ir.serde.deserialize_attribute(attribute.default_value))
    body.domain, body.name = _DOMAIN, f"{node.op_type}_{index}"
    # Bodies are written for the oldest opset they are valid in, and onnx serves the one for the
    # opset asked for.
    del body.opset_import[:]
    body.opset_import.add(domain="", version=opset)
    function = ir.serde.deserialize_function(body)
    _prefix_names(function, node)
    model.functions[function.identifier()] = function
    node.domain, node.op_type = function.domain, function.name
