"""Replaces ops with their function bodies, which come from the ONNX schemas or the registry `op_bodies`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.op_bodies import op_bodies
from onnxtrain.passes.canonical.inline_functions import inline_functions
from onnxtrain.passes.shapes.infer import infer_shapes, settle_shapes
from onnxtrain.passes.tidy.constants import lift_constants

# Domain of the functions that nodes call between getting a body and being inlined.
_DOMAIN = "onnxtrain.schema"


def has_schema_function(op_type: str, opset: int) -> bool:
    """True if ONNX defines the standard op `op_type` at `opset` with a function body, e.g. Gelu but not Conv."""
    try:
        schema = _schema(op_type, opset)
    except onnx.defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def _schema(op_type: str, opset: int) -> Any:
    # The type stubs of onnx lack the members about functions.
    return onnx.defs.get_schema(op_type, opset, "")


def inline_schema_functions(model: ir.Model, keep: Callable[[ir.Node], bool]) -> ir.Model:
    """Returns a copy of `model` with ops replaced by their function bodies, in the main graph and its subgraphs.

    Ops within bodies are expanded in turn. An op is not replaced if its body cannot be built: if it has a graph
    attribute, or if the body depends on input types that are unknown.

    Args:
        model: a model of the canonical opset without model-local functions.
        keep: returns True for nodes that must not be replaced, e.g. those with a gradient rule.
    """
    model = model.clone()
    # Some bodies depend on input types, and types of the nodes in a body are only inferred in the next round.
    while True:
        expandable = list(_expandable(model, keep))
        if not expandable:
            return model
        infer_shapes(model)
        bodies = [(node, body) for node in expandable if (body := _body_of(node, model)) is not None]
        if not bodies:
            return model
        for index, (node, body) in enumerate(bodies):
            _turn_into_call(model, node, body, index)
        model = inline_functions(model, lambda function: function.domain == _DOMAIN)
        # Only the calls used the domain.
        model.graph.opset_imports.pop(_DOMAIN, None)
        settle_shapes(lift_constants(model))


def _expandable(model: ir.Model, keep: Callable[[ir.Node], bool]) -> Iterator[ir.Node]:
    """Yields the nodes to replace: nodes without subgraphs whose op has a function body, unless `keep` returns True."""
    opset, bodies = model.graph.opset_imports[""], op_bodies()
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if (node.domain, node.op_type) not in bodies and (
            node.domain != "" or not has_schema_function(node.op_type, opset)
        ):
            continue
        # A function cannot have a graph attribute.
        if any(
            attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
            for attr in node.attributes.values()
        ):
            continue
        if not keep(node):
            yield node


def _body_of(node: ir.Node, model: ir.Model) -> ir.Function | None:
    """Returns the function body of `node`: from `op_bodies` if the op is registered there, else from its schema.

    In the latter case, missing attributes with defaults are added to `node`, because the body refers to them.

    Returns:
        The body. None if onnx cannot build it, e.g. because input types have not been inferred yet.
    """
    opset = model.graph.opset_imports[""]
    make = op_bodies().get((node.domain, node.op_type))
    if make is not None:
        return make(node, opset, model.functions)
    body = _schema_body(node, opset)
    if body is None:
        return None
    # A body refers to all attributes of the op, but a call does not pass on defaults, so these are written explicitly.
    for name, attribute in _schema(node.op_type, opset).attributes.items():
        if name not in node.attributes and attribute.default_value.name:
            node.attributes.add(ir.serde.deserialize_attribute(attribute.default_value))
    # onnx returns the body for the model's opset, but a body declares the oldest opset at which it is valid.
    del body.opset_import[:]
    body.opset_import.add(domain="", version=opset)
    return ir.serde.deserialize_function(body)


def _prefix_names(function: ir.Function, node: ir.Node) -> None:
    """Prefixes the names in a function body with the name of the node."""
    # Errors and profiles show names of inner nodes; the prefix identifies the original node.
    prefix = node.name or node.outputs[0].name or node.op_type
    for inner in function.all_nodes():
        inner.name = f"{prefix}/{inner.name or inner.op_type}"
        for output in inner.outputs:
            if output.name:
                output.name = f"{prefix}/{output.name}"


def _schema_body(node: ir.Node, opset: int) -> onnx.FunctionProto | None:
    """Returns the function body of `node` from its schema.

    Returns None if onnx cannot build it, e.g. because input types are unknown.
    """
    schema = _schema(node.op_type, opset)
    if schema.has_function:
        body = schema.get_function_with_opset_version(opset)
    else:
        types = [b"" if value is None else _type_proto(value) for value in node.inputs]
        if any(value is not None and not data for value, data in zip(node.inputs, types, strict=True)):
            return None
        versions = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
        call = ir.to_proto(node)
        # onnx builds a body only for named outputs, but a function returns all outputs up to the last one in use.
        for index, name in enumerate(call.output):
            call.output[index] = name or f"unused_{index}"
        body = schema.get_context_dependent_function_with_opset_version(
            max(versions, default=schema.since_version), call.SerializeToString(), types
        )
    function = onnx.FunctionProto()
    function.ParseFromString(body)
    del function.output[len(node.outputs) :]
    # onnx returns an empty body if it cannot build one for these types and attributes.
    return function if function.node else None


def _type_proto(value: ir.Value) -> bytes:
    """Returns the type of a value as a serialized TypeProto, or b"" if it is unknown."""
    if value.type is None:
        return b""
    return bytes(ir.serde.serialize_value(value).type.SerializeToString())


def _turn_into_call(model: ir.Model, node: ir.Node, function: ir.Function, index: int) -> None:
    """Turns `node` into a call to `function`, and adds `function` to the model. InlinePass then inlines the call.

    Args:
        model: the model.
        node: the node to replace.
        function: the function body of the node. The function, and its nodes and values, are renamed.
        index: number that makes the function's name unique.
    """
    function.domain, function.name = _DOMAIN, f"{node.op_type}_{index}"
    _prefix_names(function, node)
    model.functions[function.identifier()] = function
    node.domain, node.op_type = function.domain, function.name
    # A body from the registry is built for this node and contains the attributes as constants.
    if not function.attributes:
        node.attributes.clear()
