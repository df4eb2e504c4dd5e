"""Infers dtypes and shapes, including symbolic dimensions, with onnx's shape inference and constant folding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import onnx
import onnx_ir as ir

from onnxtrain.errors import ModelError
from onnxtrain.op_facts import SHAPE_READERS
from onnxtrain.passes.canonical.constant_branches import TakenBranchPass
from onnxtrain.passes.canonical.input_ranks import InputRanksPass
from onnxtrain.passes.canonical.known_sequences import KnownSequencesPass
from onnxtrain.passes.canonical.loop_sequences import AppendedSequencesPass
from onnxtrain.passes.canonical.unknown_ops import add_twins
from onnxtrain.passes.io.without_weights import lean_proto
from onnxtrain.passes.shapes.ceil_mode import CeilModePass
from onnxtrain.passes.shapes.implied_ranks import ImpliedRanksPass
from onnxtrain.passes.shapes.loop_states import LoopStatePass
from onnxtrain.passes.shapes.output_shape import OutputShapePass
from onnxtrain.passes.shapes.resize_sizes import ResizeSizesPass
from onnxtrain.passes.shapes.vector_inputs import VectorsPass
from onnxtrain.passes.tidy.fold_constants import FoldConstantsPass
from onnxtrain.passes.tidy.unique_names import name_apart

GENERATED = "unk__"
"""Prefix of onnx's names for unknown dimensions. Each run numbers them from zero, so equal names from two runs are not
related."""

# Separator of the name and the graph in names of constants that are copied to subgraphs.
_COPIED = "::"
# Constants with up to this many elements may be axes, sizes, pads or scales, whose values inference needs.
_SMALL = 64

# onnx's data propagation (1.23) needs about 150 bytes per element of every vector: gigabytes for vectors of millions of
# elements. It is skipped if all vectors together have more elements than this.
_MAX_ELEMENTS = 1 << 21


def settle_shapes(model: ir.Model, *, inferred: bool = False) -> ir.Model:
    """Repeats shape inference and folding of shape arithmetic, in place, until nothing changes; returns `model`.

    The passes between two inferences add missing ranks, rewrite ops for which onnx infers wrong sizes, inline the taken
    branch of each If with a constant condition, replace sequences by their elements, fold constants, and annotate the
    states of Loops. Wrong sizes are corrected before they are folded.

    Args:
        model: a model without model-local functions.
        inferred: True if the model already has the shapes that `infer_shapes(model, propagate=False)` infers, so that
            the first inference can be skipped.
    """
    loops = LoopStatePass(lambda trial: infer_shapes(trial, propagate=False))
    steps = (
        InputRanksPass(),
        ImpliedRanksPass(),
        VectorsPass(),
        CeilModePass(),
        OutputShapePass(),
        ResizeSizesPass(),
        TakenBranchPass(),
        KnownSequencesPass(),
        AppendedSequencesPass(),
        FoldConstantsPass(),
        loops,
    )
    # Data propagation comes last: the static sizes found before determine whether it would need too much memory.
    for propagate in (False, True) if _computes_with_shapes(model) else (False,):
        if propagate or not inferred:
            infer_shapes(model, propagate=propagate)
        while any(step(model).modified for step in steps):
            infer_shapes(model, propagate=propagate)
    return model


def infer_shapes(model: ir.Model, *, propagate: bool = True) -> ir.Model:
    """Annotates the values of `model` with the dtypes and shapes that onnx infers, in place; returns `model`.

    Unknown dimensions are named `unk__<n>`, and values of subgraphs get unique names. If a custom op is not
    registered in :mod:`onnxtrain.op_bodies`, its outputs and the values computed from them get no shapes.

    Args:
        model: any model.
        propagate: True to propagate computed shapes through Shape, Gather, Concat and so on. Models with vectors of
            millions of elements are excluded, because propagation would need gigabytes of memory. onnx_ir's own pass
            cannot propagate shapes, because it passes initializers as inputs.

    Raises:
        ModelError: the declared shapes contradict one another.
    """
    # Each run numbers its names from zero, so names of an earlier run would collide with those of this one.
    for graph in model.graphs():
        for value in (*graph.inputs, *(out for node in graph for out in node.outputs)):
            _forget_generated_dims(value)
    # onnx (1.23) stores propagated data by name and would confuse two values of one name in different subgraphs.
    name_apart(model)
    lean = lean_proto(model)
    add_twins(model, lean)
    _share_constants(lean.graph, {})
    # The first run, without data, determines the sizes of vectors, and so the cost of propagating data.
    inferred = _inferred(lean, data_prop=False)
    if propagate and _computes_with_shapes(model) and _vector_elements(inferred.graph) <= _MAX_ELEMENTS:
        _forget_generated_names(inferred.graph)
        inferred = _inferred(inferred, data_prop=True)
    _annotate(model.graph, inferred.graph)
    return model


def _inferred(proto: onnx.ModelProto, *, data_prop: bool) -> onnx.ModelProto:
    try:
        return onnx.shape_inference.infer_shapes(proto, data_prop=data_prop)
    # Even in non-strict mode, onnx (1.23) raises for some contradictions, e.g. with an initializer.
    except onnx.shape_inference.InferenceError as error:
        raise ModelError(
            f"Cannot infer the shapes of the model: {error}. The shape of a value differs from the "
            "declared one; correct or remove the declaration."
        ) from error


def _share_constants(graph: onnx.GraphProto, outer: Mapping[str, onnx.TensorProto]) -> None:
    """Copies small initializers into the subgraphs that read them, in place.

    onnx's shape inference finds constants only in a node's own graph.

    Args:
        graph: the main graph or a subgraph.
        outer: small initializers of the enclosing graphs, by name; empty for the main graph.
    """
    read = {name: None for node in graph.node for name in node.input if name in outer}
    copies = {name: f"{name}{_COPIED}{graph.name}" for name in read}
    for name, copied in copies.items():
        tensor = graph.initializer.add()
        tensor.CopyFrom(outer[name])
        tensor.name = copied
    small = {
        t.name: t for t in graph.initializer if math.prod(t.dims) <= _SMALL and t.name not in copies.values()
    }
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name in copies:
                node.input[index] = copies[name]
    for body in _bodies(graph):
        _share_constants(body, {**outer, **small})


def _computes_with_shapes(model: ir.Model) -> bool:
    """True if the model has a Shape or Size node. Without one, data propagation infers nothing more."""
    nodes = (*model.graph.all_nodes(), *(node for f in model.functions.values() for node in f.all_nodes()))
    return any(node.op_type in SHAPE_READERS and node.domain == "" for node in nodes)


def _vector_elements(graph: onnx.GraphProto) -> int:
    """Returns the number of elements in all vectors of static size: the cost of data propagation grows with it.

    Includes the vectors in subgraphs.
    """
    total = 0
    for info in (*graph.input, *graph.value_info, *graph.output):
        dims = info.type.tensor_type.shape.dim
        total += dims[0].dim_value if len(dims) == 1 else 0
    return total + sum(map(_vector_elements, _bodies(graph)))


def _forget_generated_names(graph: onnx.GraphProto) -> None:
    """Removes the names that onnx has given to unknown dimensions, in place."""
    # The second run numbers from zero again.
    for info in (*graph.input, *graph.value_info, *graph.output):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param.startswith(GENERATED):
                dim.ClearField("dim_param")
    for body in _bodies(graph):
        _forget_generated_names(body)


def _bodies(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yields the subgraphs of a graph's nodes, but not their nested subgraphs."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield attribute.g
            yield from attribute.graphs


def _annotate(graph: ir.Graph, inferred: onnx.GraphProto) -> None:
    """Copies types and shapes from `inferred`, the proto made from `graph`, to all values of `graph`."""
    types = {info.name: info.type for info in (*inferred.input, *inferred.value_info, *inferred.output)}
    # The proto has large initializers as additional inputs at the end.
    for value, info in zip(graph.inputs, inferred.input, strict=False):
        _describe(value, info.type)
    for node, twin in zip(graph, inferred.node, strict=True):
        for value, name in zip(node.outputs, twin.output, strict=False):
            if name in types:
                _describe(value, types[name])
        for attribute in twin.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _annotate(node.attributes[attribute.name].as_graph(), attribute.g)
            elif attribute.type == onnx.AttributeProto.GRAPHS:
                bodies = node.attributes[attribute.name].as_graphs()
                for body, inner in zip(bodies, attribute.graphs, strict=True):
                    _annotate(body, inner)


def _describe(value: ir.Value, described: onnx.TypeProto) -> None:
    """Copies the type and the shape from the proto `described` to `value`, if the proto has them."""
    type_ = ir.serde.deserialize_type_proto_for_type(described)
    shape = ir.serde.deserialize_type_proto_for_shape(described)
    if type_ is not None:
        value.type = type_
    if shape is not None:
        value.shape = shape


def _forget_generated_dims(value: ir.Value) -> None:
    """Makes the dimensions of `value` unknown that an earlier inference has named, e.g. "unk__0"."""
    if value.shape is None:
        return
    dims = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    kept = [None if isinstance(dim, str) and dim.startswith(GENERATED) else dim for dim in dims]
    if kept != dims:
        value.shape = ir.Shape(kept)
