"""Infer dtypes and shapes with symbolic dimensions."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from onnxtrain.passes.ceil_mode import CeilModePass
from onnxtrain.passes.fold import FoldConstantsPass
from onnxtrain.passes.lean import lean_proto
from onnxtrain.passes.ranks import ImpliedRanksPass

__all__ = ["infer_shapes", "settle_shapes"]

# onnx's names for dimensions it knows nothing about. Each run counts from zero, so one name from two runs
# would declare two unrelated dimensions equal.
_GENERATED = "unk__"


def settle_shapes(model: ir.Model) -> ir.Model:
    """Infer shapes and fold shape arithmetic in turns, in place, until neither finds more; return `model`.

    Ranks that the model leaves open come from the ops. Poolings whose windows shape inference miscounts are
    rewritten: what is folded must not follow from them.
    """
    infer_shapes(model)
    passes = (ImpliedRanksPass(), CeilModePass(), FoldConstantsPass())
    while any(step(model).modified for step in passes):
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
    inferred = ir.from_proto(onnx.shape_inference.infer_shapes(lean_proto(model), data_prop=True))
    # The lean model has the same graphs and nodes in the same order, and more inputs at the end.
    for graph, lean in zip(model.graphs(), inferred.graphs(), strict=True):
        for target, source in zip(graph.inputs, lean.inputs, strict=False):
            _annotate(target, source)
        for node, twin in zip(graph, lean, strict=True):
            for target, source in zip(node.outputs, twin.outputs, strict=False):
                _annotate(target, source)
    return model


def _annotate(target: ir.Value, source: ir.Value) -> None:
    if source.type is not None:
        target.type = source.type
    if source.shape is not None:
        target.shape = source.shape


def _without_generated_names(shape: ir.Shape | None) -> ir.Shape | None:
    if shape is None:
        return None
    dims = [dim if isinstance(dim, int) else dim.value for dim in shape]
    return ir.Shape([None if isinstance(dim, str) and dim.startswith(_GENERATED) else dim for dim in dims])
