"""State ops that onnx does not know in standard ops: their results, or at least the shapes of their results."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx_ir as ir

from onnxtrain.errors import OnnxTrainError

TWINS: dict[tuple[str, str], Callable[[ir.Node, int], ir.Function]] = {}
"""By domain and name of an op: makes, for a node and an opset, a function whose outputs have the node's shapes."""

BODIES: dict[tuple[str, str], Callable[..., ir.Function]] = {}
"""As `TWINS`, for functions that compute the op's results, e.g. ("com.microsoft", "MultiHeadAttention"). A third
argument, the function table of the model, lets the body call functions that it adds there."""


def add_twins(model: ir.Model, lean: onnx.ModelProto) -> None:
    """Replace nodes that onnx does not know by calls of their twins, which onnx's shape inference follows.

    Args:
        model: The model that `lean` was made from, with the same nodes in the same order; it is not changed.
        lean: The proto, changed in place.
    """
    opset = model.graph.opset_imports[""]
    for index, (node, proto) in enumerate(zip(model.graph, lean.graph.node, strict=True)):
        key = (node.domain, node.op_type)
        make = TWINS.get(key) or BODIES.get(key)
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
