"""Infer dtypes and shapes with symbolic dimensions."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from onnxtrain.passes.ceil_mode import CeilModePass
from onnxtrain.passes.fold import FoldConstantsPass
from onnxtrain.passes.lean import lean_proto

__all__ = ["infer_shapes", "settle_shapes"]

# onnx's names for dimensions it knows nothing about. Each run counts from zero, so one name from two runs
# would declare two unrelated dimensions equal.
_GENERATED = "unk__"


def settle_shapes(model: ir.Model) -> ir.Model:
    """Infer shapes and fold shape arithmetic in turns, in place, until neither finds more; return `model`.

    Poolings whose windows shape inference miscounts are rewritten: what is folded must not follow from them.
    """
    infer_shapes(model)
    while CeilModePass()(model).modified or FoldConstantsPass()(model).modified:
        infer_shapes(model)
    return model


def infer_shapes(model: ir.Model) -> ir.Model:
    """Annotate the values of `model` in place with the dtypes and shapes that onnx can infer, and return it.

    Shape computations are followed through Shape, Gather, Concat and the like, which onnx_ir's own pass
    prevents: it hands initializers over as inputs, and then they are no constants. Unknown dimensions get
    names `unk__<n>`. Ops that onnx does not know end the inference downstream of them; they are no error.
    """
    for graph in model.graphs():
        for value in (*graph.inputs, *(out for node in graph for out in node.outputs)):
            value.shape = _without_generated_names(value.shape)
    inferred = onnx.shape_inference.infer_shapes(lean_proto(model), data_prop=True)
    _annotate(model.graph, inferred.graph)
    return model


def _annotate(graph: ir.Graph, inferred: onnx.GraphProto) -> None:
    """Give the values of a graph, and of its subgraphs, what its twin says of them."""
    known = {info.name: info.type for info in (*inferred.input, *inferred.value_info, *inferred.output)}
    for value, info in zip(graph.inputs, inferred.input, strict=False):  # the twin has more, at the end
        _describe(value, info.type)
    for node, twin in zip(graph, inferred.node, strict=True):
        for value, name in zip(node.outputs, twin.output, strict=False):
            if name in known:
                _describe(value, known[name])
        for attribute in twin.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _annotate(node.attributes[attribute.name].as_graph(), attribute.g)
            elif attribute.type == onnx.AttributeProto.GRAPHS:
                bodies = node.attributes[attribute.name].as_graphs()
                for body, inner in zip(bodies, attribute.graphs, strict=True):
                    _annotate(body, inner)


def _describe(value: ir.Value, described: onnx.TypeProto) -> None:
    type_ = ir.serde.deserialize_type_proto_for_type(described)
    shape = ir.serde.deserialize_type_proto_for_shape(described)
    if type_ is not None:
        value.type = type_
    if shape is not None:
        value.shape = shape


def _without_generated_names(shape: ir.Shape | None) -> ir.Shape | None:
    if shape is None:
        return None
    dims = [dim if isinstance(dim, int) else dim.value for dim in shape]
    return ir.Shape([None if isinstance(dim, str) and dim.startswith(_GENERATED) else dim for dim in dims])
