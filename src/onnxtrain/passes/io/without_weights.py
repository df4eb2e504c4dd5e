"""Creates protos without weights for onnx's C++ code: version converter, checker, shape inference, inliner.

These functions serialize the model, and protobuf is limited to 2 GB. They read only the values of small tensors
(shapes, axes, scales), so large initializers are temporarily turned into graph inputs of the same type.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import onnx
import onnx_ir as ir

from onnxtrain.passes.tidy.constants import initializers_set_aside, sort_initializers

# Domain for ops that onnx does not know; see `_hide_unregistered`.
_UNREGISTERED = "onnxtrain.unregistered"

BIG_ELEMENTS = 4096
"""Initializers with more elements than this become inputs of a lean proto."""

# Dtypes that the version converter's C++ IR supports. Weights may have others: 4-bit integers, 8-bit floats.
_CONVERTIBLE = frozenset(
    ir.DataType[name]
    for name in (
        "FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16", "INT8", "INT16", "INT32", "INT64",
        "UINT8", "UINT16", "UINT32", "UINT64", "BOOL", "STRING",
    )
)  # fmt: skip


def _is_big(tensor: ir.TensorProtocol | None) -> bool:
    """True if an initializer must become an input: it is large, has no data, or has a dtype unknown to onnx's C++."""
    return tensor is None or tensor.size > BIG_ELEMENTS or tensor.dtype not in _CONVERTIBLE


def lean_proto(model: ir.Model) -> onnx.ModelProto:
    """Returns `model` as a proto without large weights, for onnx's checker, shape inference and converter.

    Large initializers become graph inputs, after the existing inputs. So do initializers that have no data, or a dtype
    unknown to onnx's C++ code. Ops of the standard domain that onnx doesn't know are moved to a separate domain.
    `model` is not modified. :func:`restore` undoes these changes after a conversion.
    """
    if has_unnamed_values(model):
        # Cloning names them.
        model = model.clone()
    graph = model.graph
    big = {name: value for name, value in graph.initializers.items() if _is_big(value.const_value)}
    with initializers_set_aside(graph, big):
        lean = ir.to_proto(model)
    # If an initializer is already an input, its tensor is a default value.
    inputs = {info.name for info in lean.graph.input}
    lean.graph.input.extend(_described(value) for name, value in big.items() if name not in inputs)
    if _hide_unregistered(lean.graph.node, graph.opset_imports[""]):
        lean.opset_import.add(domain=_UNREGISTERED, version=1)
    return lean


def has_unnamed_values(model: ir.Model) -> bool:
    """True if a node reads a value without a name, to which a proto cannot refer."""
    nodes = (*model.graph.all_nodes(), *(node for f in model.functions.values() for node in f.all_nodes()))
    return any(value.name is None and value.uses() for node in nodes for value in node.outputs)


def _described(value: ir.Value) -> onnx.ValueInfoProto:
    """Returns a graph input with the name, dtype and shape of an initializer."""
    # The tensor always has dtype and shape, whereas the initializer may not be annotated.
    tensor = value.const_value
    if tensor is None:
        return ir.serde.serialize_value(value)
    return onnx.helper.make_tensor_value_info(str(value.name), int(tensor.dtype), tensor.shape.numpy())


def _hide_unregistered(nodes: Iterable[onnx.NodeProto], opset: int) -> bool:
    """Moves ops unknown to onnx from the standard domain to a separate domain. Returns True if there were any.

    ONNX Runtime defines ops in the standard domain, such as SimplifiedLayerNormalization. onnx's C++ code fails on
    them, but accepts unknown ops of other domains.
    """
    any_hidden = False
    for node in nodes:
        if node.domain in ("", "ai.onnx") and not _is_registered(node.op_type, opset):
            node.domain = _UNREGISTERED
            any_hidden = True
        for attribute in node.attribute:
            for body in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                any_hidden |= _hide_unregistered(body.node, opset)
    return any_hidden


@functools.cache
def _is_registered(op_type: str, opset: int) -> bool:
    """True if onnx has a schema for a standard op at this opset."""
    try:
        onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return False
    return True


def restore(lean: ir.Model, original: ir.Model) -> None:
    """Undoes :func:`lean_proto` in place, after a lean proto of `original` was converted to the model `lean`.

    Inputs that are initializers of `original` become initializers again, in the original order. Initializers that a
    converter has added come last. Ops that were moved to a separate domain return to the standard domain.
    """
    for node in ir.traversal.RecursiveGraphIterator(lean.graph):
        if node.domain == _UNREGISTERED:
            node.domain = ""
    lean.graph.opset_imports.pop(_UNREGISTERED, None)
    graph = lean.graph
    present = {value.name: value for value in (*graph.inputs, *graph.initializers.values())}
    for name, source in original.graph.initializers.items():
        value = present.get(name)
        # The converter may have turned it into an attribute, or dropped it.
        if value is None:
            continue
        value.const_value = source.const_value
        value.metadata_props.update(source.metadata_props)
        graph.register_initializer(value)
    sort_initializers(graph, original.graph.initializers)
    kept = [value for value in graph.inputs if value.name not in original.graph.initializers]
    graph.inputs.clear()
    graph.inputs.extend(kept)
