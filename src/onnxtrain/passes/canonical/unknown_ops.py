"""Ops that onnx does not know, in standard ops: what they compute, or at least the shapes that they have."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx_ir as ir

from onnxtrain.errors import OnnxTrainError

TWINS: dict[tuple[str, str], Callable[[ir.Node, int], ir.Function]] = {}
"""For ops by domain and name: what makes a function whose outputs have the shapes of those of a node, at an opset."""

BODIES: dict[tuple[str, str], Callable[[ir.Node, int], ir.Function]] = {}
"""As `TWINS`, for functions that compute what the op computes."""


def add_twins(model: ir.Model, lean: onnx.ModelProto) -> None:
    """Make calls of their twins, in place, of those nodes of a proto that have one; shape inference follows calls.

    Args:
        model: what `lean` was made from: it has the same nodes in the same order.
        lean: the proto.
    """
    opset = model.graph.opset_imports[""]
    for index, (node, proto) in enumerate(zip(model.graph, lean.graph.node, strict=True)):
        key = (node.domain, node.op_type)
        make = TWINS.get(key) or BODIES.get(key)
        if make is None or node.op_identifier() in model.functions:
            continue
        try:
            function = ir.to_proto(make(node, opset))
        except OnnxTrainError:  # it wants a rank that is not known yet, or is not written for such a node
            continue
        function.domain, function.name = "onnxtrain.twin", f"{node.op_type}_{index}"
        del function.output[len(proto.output) :]
        proto.domain, proto.op_type = function.domain, function.name
        del proto.attribute[:]
        lean.functions.append(function)
        if all(imported.domain != function.domain for imported in lean.opset_import):
            lean.opset_import.add(domain=function.domain, version=1)
