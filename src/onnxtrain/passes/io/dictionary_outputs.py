"""Converts dictionary outputs to tensors, because onnx_ir and gradients do not support dictionaries."""

from __future__ import annotations

import onnx


def tensors_for_maps(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Returns `proto`, or, if a ZipMap computes one of its outputs, a copy with Identity in place of ZipMap.

    scikit-learn converters end every classifier with a ZipMap, which turns probabilities float32 [N, C] into N
    dictionaries. In the copy, the output of the same name is the tensor of probabilities.
    """
    zipped = {node.output[0]: node for node in proto.graph.node if _is_zip_map(node)}
    if not any(value.name in zipped for value in proto.graph.output):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    # A ZipMap has its classes in one of two attributes, as integers or strings.
    classes = {
        name: max(len(a.ints) + len(a.strings) for a in node.attribute) for name, node in zipped.items()
    }
    for node in copy.graph.node:
        if _is_zip_map(node):
            node.op_type, node.domain = "Identity", ""
            del node.attribute[:]
    for value in (*copy.graph.output, *copy.graph.value_info):
        if value.name in zipped:
            value.type.CopyFrom(
                onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [None, classes[value.name]])
            )
    # Identity is in the standard domain; a classifier may import only ai.onnx.ml.
    if not any(entry.domain in ("", "ai.onnx") for entry in copy.opset_import):
        copy.opset_import.append(onnx.helper.make_opsetid("", 13))
    return copy


def _is_zip_map(node: onnx.NodeProto) -> bool:
    """True if a node is a ZipMap of ai.onnx.ml."""
    return node.op_type == "ZipMap" and node.domain == "ai.onnx.ml"
