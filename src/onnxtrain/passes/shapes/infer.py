"""Infer dtypes and shapes with symbolic dimensions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import onnx
import onnx_ir as ir

from onnxtrain.op_facts import SHAPE_READERS
from onnxtrain.passes.canonical.constant_branches import TakenBranchPass
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

# onnx's names for dimensions it knows nothing about. Each run counts from zero, so one name from two runs
# would declare two unrelated dimensions equal.
_GENERATED = "unk__"

_COPIED = "::"
_SMALL = 64
"""Elements of a constant that may be axes, sizes, pads or scales."""

# Propagating data costs onnx (1.23) some 150 bytes for each element of a tensor of rank 1, whatever is in it.
_MAX_ELEMENTS = 1 << 21


def settle_shapes(model: ir.Model) -> ir.Model:
    """Infer shapes and fold shape arithmetic in turns, in place, until neither finds more; return `model`.

    Ranks that the model leaves open come from the ops. Poolings, Resizes and ConvTransposes whose sizes shape inference
    miscounts are rewritten: what is folded must not follow from them. An If whose condition turns out to be constant
    becomes the branch that is taken, sequences of known tensors become these, and those that a Loop appends to what it
    scans; the state of a Loop gets the shape that each iteration keeps. Data are propagated last, when all static sizes
    are known that could make it costly.
    """
    loops = LoopStatePass(lambda trial: infer_shapes(trial, propagate=False))
    steps = (
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
    for propagate in (False, True) if _computes_with_shapes(model) else (False,):
        infer_shapes(model, propagate=propagate)
        while any(step(model).modified for step in steps):
            infer_shapes(model, propagate=propagate)
    return model


def infer_shapes(model: ir.Model, *, propagate: bool = True) -> ir.Model:
    """Annotate the values of `model` in place with the dtypes and shapes that onnx can infer, and return it.

    Unknown dimensions get names `unk__<n>`, values of subgraphs names of their own. Ops that onnx does not know, and
    for which nobody has stated a twin, end the inference downstream of them; they are no error.

    Args:
        model: Any model.
        propagate: Whether to follow shape computations through Shape, Gather, Concat and the like, which onnx_ir's
            own pass prevents: it hands initializers over as inputs, and then they are no constants. This is
            not done in models with vectors of millions of elements, which it would cost gigabytes.
    """
    for graph in model.graphs():
        for value in (*graph.inputs, *(out for node in graph for out in node.outputs)):
            value.shape = _without_generated_names(value.shape)
    name_apart(model)
    lean = lean_proto(model)
    add_twins(model, lean)
    _share_constants(lean.graph, {})
    inferred = onnx.shape_inference.infer_shapes(lean, data_prop=False)
    if propagate and _computes_with_shapes(model) and _vector_elements(inferred.graph) <= _MAX_ELEMENTS:
        _forget_generated_names(inferred.graph)
        inferred = onnx.shape_inference.infer_shapes(inferred, data_prop=True)
    _annotate(model.graph, inferred.graph)
    return model


def _share_constants(graph: onnx.GraphProto, outer: Mapping[str, onnx.TensorProto]) -> None:
    """Copy small initializers to the subgraphs that read them: onnx looks for axes and sizes in one graph only."""
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
    """Whether there is anything that propagating data could tell."""
    nodes = (*model.graph.all_nodes(), *(node for f in model.functions.values() for node in f.all_nodes()))
    return any(node.op_type in SHAPE_READERS and node.domain == "" for node in nodes)


def _vector_elements(graph: onnx.GraphProto) -> int:
    """Returns the number of elements of all tensors of rank 1 whose size is known, in subgraphs too."""
    total = 0
    for info in (*graph.input, *graph.value_info, *graph.output):
        dims = info.type.tensor_type.shape.dim
        total += dims[0].dim_value if len(dims) == 1 else 0
    return total + sum(map(_vector_elements, _bodies(graph)))


def _forget_generated_names(graph: onnx.GraphProto) -> None:
    for info in (*graph.input, *graph.value_info, *graph.output):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param.startswith(_GENERATED):
                dim.ClearField("dim_param")
    for body in _bodies(graph):
        _forget_generated_names(body)


def _bodies(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield attribute.g
            yield from attribute.graphs


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
