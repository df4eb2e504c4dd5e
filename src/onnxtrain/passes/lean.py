"""Hand a model to onnx's C++ (converter, checker) without its weights.

Those functions serialise the model, and protobuf stops at 2 GB. They only look at the values of small tensors
(shapes, axes, scales), so big initializers become typed graph inputs for the length of the call.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

__all__ = ["BIG_ELEMENTS", "lean_proto", "restore"]

_UNREGISTERED = "onnxtrain.unregistered"

BIG_ELEMENTS = 4096
"""Initializers with more elements than this are left out of a lean proto."""

# onnx's C++ IR cannot hold the other ones (sub-byte and 8-bit floats); only weights have them.
_CONVERTIBLE = frozenset(
    {
        ir.DataType.FLOAT,
        ir.DataType.DOUBLE,
        ir.DataType.FLOAT16,
        ir.DataType.BFLOAT16,
        ir.DataType.INT8,
        ir.DataType.INT16,
        ir.DataType.INT32,
        ir.DataType.INT64,
        ir.DataType.UINT8,
        ir.DataType.UINT16,
        ir.DataType.UINT32,
        ir.DataType.UINT64,
        ir.DataType.BOOL,
        ir.DataType.STRING,
    }
)


def _is_big(tensor: ir.TensorProtocol | None) -> bool:
    return tensor is None or tensor.size > BIG_ELEMENTS or tensor.dtype not in _CONVERTIBLE


def lean_proto(model: ir.Model) -> onnx.ModelProto:
    """Return `model` as a proto in which big initializers are typed inputs, after the real ones."""
    lean = model.clone()
    _hide_unregistered(lean)
    for name, value in tuple(lean.graph.initializers.items()):
        tensor = value.const_value
        if not _is_big(tensor):
            continue
        if tensor is not None:
            value.dtype = tensor.dtype
            value.shape = ir.Shape(tensor.shape.numpy())
        lean.graph.initializers.pop(name)
        value.const_value = None
        if value not in lean.graph.inputs:
            lean.graph.inputs.append(value)
    return ir.to_proto(lean)


def _hide_unregistered(model: ir.Model) -> None:
    """Move ops that onnx does not know out of the standard domain.

    ONNX Runtime has some of its own there, such as SimplifiedLayerNormalization; onnx's C++ gives up on them.
    """
    opset = model.graph.opset_imports[""]
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.domain == "" and not _is_registered(node.op_type, opset):
            node.domain = _UNREGISTERED
            model.graph.opset_imports[_UNREGISTERED] = 1


def _is_registered(op_type: str, opset: int) -> bool:
    try:
        onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return False
    return True


def restore(lean: ir.Model, original: ir.Model) -> None:
    """Undo in `lean`, in place, what :func:`lean_proto` did to `original`.

    Inputs that are initializers of `original` become such again, in the original order. Initializers that
    only `lean` has (a converter adds some) follow.
    """
    for node in ir.traversal.RecursiveGraphIterator(lean.graph):
        if node.domain == _UNREGISTERED:
            node.domain = ""
    lean.graph.opset_imports.pop(_UNREGISTERED, None)
    graph = lean.graph
    present = {value.name: value for value in (*graph.inputs, *graph.initializers.values())}
    added = [value for name, value in graph.initializers.items() if name not in original.graph.initializers]
    graph.initializers.clear()
    for name, source in original.graph.initializers.items():
        value = present.get(name)
        if value is None:
            continue
        value.const_value = source.const_value
        value.metadata_props.update(source.metadata_props)
        graph.register_initializer(value)
    for value in added:
        graph.register_initializer(value)
    kept = [value for value in graph.inputs if value.name not in original.graph.initializers]
    graph.inputs.clear()
    graph.inputs.extend(kept)
