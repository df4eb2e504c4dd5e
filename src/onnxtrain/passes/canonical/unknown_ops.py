"""State ops that onnx does not know in standard ops: their results, or at least the shapes of their results."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from onnxtrain.errors import OnnxTrainError
from onnxtrain.op_bodies import op_shapes


def add_twins(model: ir.Model, lean: onnx.ModelProto) -> None:
    """Replace nodes that onnx does not know by calls of their twins, which onnx's shape inference follows.

    Args:
        model: The model that `lean` was made from, with the same nodes in the same order; it is not changed.
        lean: The proto, changed in place.
    """
    opset, shapes = model.graph.opset_imports[""], op_shapes()
    for index, (node, proto) in enumerate(zip(model.graph, lean.graph.node, strict=True)):
        make = shapes.get((node.domain, node.op_type))
        if make is None or node.op_identifier() in model.functions:
            continue
        try:
            function = ir.to_proto(make(node, opset))
        # The twin needs a rank that is not known yet, or is not written for such a node: its shapes stay open.
        except OnnxTrainError:
            continue
        function.domain, function.name = "onnxtrain.twin", f"{node.op_type}_{index}"
        # A node may leave out outputs at the end; the function then has as many as the call.
        del function.output[len(proto.output) :]
        proto.domain, proto.op_type = function.domain, function.name
        del proto.attribute[:]
        lean.functions.append(function)
        if all(imported.domain != function.domain for imported in lean.opset_import):
            lean.opset_import.add(domain=function.domain, version=1)
