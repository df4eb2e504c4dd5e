"""Leave tensors where a model ends in dictionaries: neither the IR nor a gradient knows them."""

from __future__ import annotations

import onnx


def tensors_for_maps(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto`, or where ZipMap nodes give outputs of it, a copy in which these are what they are made of.

    Converters of scikit-learn put a ZipMap behind every classifier, which makes N dictionaries of probabilities [N, C].
    An output of the same name then holds the probabilities.
    """
    zipped = {node.output[0]: node for node in proto.graph.node if _is_zip_map(node)}
    given = [value.name for value in proto.graph.output if value.name in zipped]
    if not given:
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
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
    if not any(entry.domain in ("", "ai.onnx") for entry in copy.opset_import):
        copy.opset_import.append(onnx.helper.make_opsetid("", 13))
    return copy


def _is_zip_map(node: onnx.NodeProto) -> bool:
    return node.op_type == "ZipMap" and node.domain == "ai.onnx.ml"
