"""Adds an axis to the inputs of a forward graph whose loss reads several rows per sample, e.g. the texts of a pair."""

from __future__ import annotations

import json

import onnx_ir as ir

from onnxtrain._words import words
from onnxtrain.emitter import Emitter
from onnxtrain.errors import GraphBuildError
from onnxtrain.losses import TARGET_KEY


def group_inputs(model: ir.Model, *, cached: bool) -> None:
    """Gives the inputs of a forward graph the shape [pairs, groups, ...], if its loss reads groups of rows.

    The graph then reshapes them to [pairs · groups, ...], so that samples are along axis 0 of all inputs and targets.
    The inference model keeps the shapes of the file.

    Args:
        model: the forward graph, changed in place. A target with the entry "groups" in its metadata causes the change.
        cached: True if the original model has a key-value cache.

    Raises:
        GraphBuildError: an input has no batch axis or a fixed batch size, or the model has a key-value cache.
    """
    graph = model.graph
    marks = {value: json.loads(value.metadata_props.get(TARGET_KEY, "{}")) for value in graph.inputs}
    grouped = next((value for value, entry in marks.items() if "groups" in entry), None)
    if grouped is None:
        return
    groups = marks[grouped]["groups"]
    assert grouped.shape is not None
    first = grouped.shape[0]
    if cached:
        raise GraphBuildError(
            "building the training graph: the model has a key-value cache; export it without a cache to train its "
            "embeddings"
        )
    op = Emitter(graph)
    for index, value in enumerate(list(graph.inputs)):
        if marks[value].get("sample_weight"):
            value.shape = ir.Shape([first])
        if TARGET_KEY in value.metadata_props or value.dtype == ir.DataType.STRING:
            continue
        dims = tuple(value.shape or ())
        if not dims or isinstance(dims[0], int):
            raise GraphBuildError(
                f"building the training graph: the input {value.name!r} has shape {value.shape}, but the texts of a "
                "batch need a symbolic first axis. Export the model with a dynamic batch axis, or "
                f"{words().dynamic_batch()}"
            )
        _add_axis(op, index, value, [first, groups, *dims[1:]])


def _add_axis(op: Emitter, index: int, value: ir.Value, dims: list[int | str | ir.SymbolicDim]) -> None:
    """Replaces the input at `index` by an input of shape `dims`, of which a Reshape merges the first two axes."""
    graph = op.graph
    name = str(value.name)
    whole = ir.Value(name=name, shape=ir.Shape(dims), type=value.type)
    whole.metadata_props.update(value.metadata_props)
    graph.inputs[index] = whole
    value.name = op.unique_name(f"{name}_rows")
    rest = list(dims[2:])
    with op.placing(before=next(iter(graph), None)):
        known = [dim for dim in rest if isinstance(dim, int)]
        static = len(known) == len(rest)
        shape = op.const([-1, *known]) if static else op.Concat([-1], op.Shape(whole, start=2), axis=0)
        rows = op.Reshape(whole, shape)
    rows.shape, rows.type = value.shape, value.type
    value.replace_all_uses_with(rows)
