"""Substitutes ops that onnx does not know, so that its shape inference continues past them."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from onnxtrain.errors import OnnxTrainError
from onnxtrain.op_bodies import op_shapes


def add_twins(model: ir.Model, lean: onnx.ModelProto) -> None:
    """Replaces nonstandard ops in a proto with calls to functions that have the same output shapes.

    The functions consist of standard ops, so onnx can infer the shapes. Some nodes are not modified: calls to functions
    of the model, ops that are not in `op_shapes()`, and nodes that the op's shape function does not support, e.g.
    because a rank is unknown.

    Args:
        model: the model from which `lean` was made, with the same nodes in the same order; not modified.
        lean: the proto, without large weights; modified in place.
    """
    opset, shapes = model.graph.opset_imports[""], op_shapes()
    for index, (node, proto) in enumerate(zip(model.graph, lean.graph.node, strict=True)):
        make = shapes.get((node.domain, node.op_type))
        if make is None or node.op_identifier() in model.functions:
            continue
        try:
            function = ir.to_proto(make(node, opset))
        # A required rank is unknown, or the function does not support this node: its shapes remain unknown.
        except OnnxTrainError:
            continue
        function.domain, function.name = "onnxtrain.twin", f"{node.op_type}_{index}"
        # A call must not have fewer outputs than the function, and a node may omit trailing outputs.
        del function.output[len(proto.output) :]
        proto.domain, proto.op_type = function.domain, function.name
        del proto.attribute[:]
        lean.functions.append(function)
        if all(imported.domain != function.domain for imported in lean.opset_import):
            lean.opset_import.add(domain=function.domain, version=1)
