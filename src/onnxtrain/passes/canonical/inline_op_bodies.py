"""Replace ops by function bodies: those of their ONNX schemas, or those registered in `op_bodies`."""

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
    """Return whether ONNX defines the standard op `op_type` of `opset` by a function body, e.g. Gelu: yes, Conv: no."""
    try:
        schema = _schema(op_type, opset)
    except onnx.defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def _schema(op_type: str, opset: int) -> Any:
    # The type stubs of onnx lack the members about functions.
    return onnx.defs.get_schema(op_type, opset, "")


def inline_schema_functions(model: ir.Model, keep: Callable[[ir.Node], bool]) -> ir.Model:
    """Return a copy of `model` in which ops with a function body are replaced by it, also in subgraphs.

    Bodies that contain such ops are expanded in turn. An op stays if its body cannot be built: if it has a graph
    attribute, or the body depends on input types that are not known.

    Args:
        model: A model of the canonical opset without model-local functions.
        keep: True for nodes with a function body that shall stay, e.g. those with a gradient rule.
    """
    model = model.clone()
    # Some bodies depend on the types of inputs, and nodes of a body get theirs when the next round infers types.
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
        # The domain exists between marking calls and inlining them only.
        model.graph.opset_imports.pop(_DOMAIN, None)
        settle_shapes(lift_constants(model))


def _expandable(model: ir.Model, keep: Callable[[ir.Node], bool]) -> Iterator[ir.Node]:
    """Yield the nodes that have a function body and are not to be kept."""
    opset, bodies = model.graph.opset_imports[""], op_bodies()
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if (node.domain, node.op_type) not in bodies and (
            node.domain != "" or not has_schema_function(node.op_type, opset)
        ):
            continue
        # A function cannot take a graph as an attribute.
        if any(
            attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
            for attr in node.attributes.values()
        ):
            continue
        if not keep(node):
            yield node


def _body_of(node: ir.Node, model: ir.Model) -> ir.Function | None:
    """Return the function body of `node`, registered or of the schema; None if it needs types that are not known."""
    opset = model.graph.opset_imports[""]
    make = op_bodies().get((node.domain, node.op_type))
    if make is not None:
        return make(node, opset, model.functions)
    body = _schema_body(node, opset)
    if body is None:
        return None
    # A body refers to all attributes of the op; a call passes on those that it has, without defaults.
    for name, attribute in _schema(node.op_type, opset).attributes.items():
        if name not in node.attributes and attribute.default_value.name:
            node.attributes.add(ir.serde.deserialize_attribute(attribute.default_value))
    # A body declares the oldest opset it is valid in. onnx has given us the one that holds at the model's opset.
    del body.opset_import[:]
    body.opset_import.add(domain="", version=opset)
    return ir.serde.deserialize_function(body)


def _prefix_names(function: ir.Function, node: ir.Node) -> None:
    """Put the name of a node in front of the names in its function body."""
    # Errors and profiles name inner nodes; the prefix leads back to the node of the file.
    prefix = node.name or node.outputs[0].name or node.op_type
    for inner in function.all_nodes():
        inner.name = f"{prefix}/{inner.name or inner.op_type}"
        for output in inner.outputs:
            if output.name:
                output.name = f"{prefix}/{output.name}"


def _schema_body(node: ir.Node, opset: int) -> onnx.FunctionProto | None:
    """Return the schema's function body for `node`; None if it needs types of inputs that are not known."""
    schema = _schema(node.op_type, opset)
    if schema.has_function:
        body = schema.get_function_with_opset_version(opset)
    else:
        types = [b"" if value is None else _type_proto(value) for value in node.inputs]
        if any(value is not None and not data for value, data in zip(node.inputs, types, strict=True)):
            return None
        versions = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
        call = ir.to_proto(node)
        # onnx builds a body for named outputs only, but a function returns all outputs up to the last one in use.
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
    """Return the type of a value as a serialised TypeProto; empty if it is unknown."""
    if value.type is None:
        return b""
    return bytes(ir.serde.serialize_value(value).type.SerializeToString())


def _turn_into_call(model: ir.Model, node: ir.Node, function: ir.Function, index: int) -> None:
    """Turn `node` into a call of `function`, a new model-local function, for InlinePass to inline."""
    function.domain, function.name = _DOMAIN, f"{node.op_type}_{index}"
    _prefix_names(function, node)
    model.functions[function.identifier()] = function
    node.domain, node.op_type = function.domain, function.name
    # A registered body is written for this node alone, with its attributes as constants.
    if not function.attributes:
        node.attributes.clear()
