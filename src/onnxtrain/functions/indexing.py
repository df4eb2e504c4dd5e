"""Defines ops that read or write elements at other places: rows at given indices, extrema, and transposes."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.emitter import AttributeRef, Emitter

from ._composite import CompositeOp, composite
from ._specialized import SpecializedOp

REDUCTIONS = ("none", "add", "max", "min")
"""Reductions of ScatterRows, in the order of the numbers by which the native kernel knows them."""


@composite(
    "EmbeddingGradient",
    ["ct", "indices", "shape"],
    dtypes={"indices": ir.DataType.INT64, "shape": ir.DataType.INT64},
)
def embedding_gradient(op: Emitter, ct: ir.Value, indices: ir.Value, shape: ir.Value) -> ir.Value:
    """VJP of Gather along axis 0: scatter-adds the rows of ct into zeros of shape `shape`, at `indices`.

    ct: `[*indices, *rest]`; indices: int64 of any shape, in [-n, n); shape: `[n, *rest]`.
    """
    zeros = op.Expand(op.const(0, like=ct), shape)
    return op.ScatterND(zeros, op.Unsqueeze(indices, [-1]), ct, reduction="add")


@composite("Extremum", ["x"], dict.fromkeys(("axis", "largest"), ir.AttributeType.INT), outputs=2)
def extremum(
    op: Emitter, x: ir.Value, *, axis: AttributeRef, largest: AttributeRef
) -> tuple[ir.Value, ir.Value]:
    """Returns the maximum or minimum along an axis, and its index: the first one, or the first NaN.

    Both results keep the axis, with size 1.

    Args:
        op: emitter of the function body.
        x: float, of rank 1 or more.
        axis: the axis, of size 1 or more; negative axes count from the last one.
        largest: 1 for the maximum, 0 for the minimum.
    """
    _, index = op.TopK(x, op.const([1]), axis=axis, largest=largest, _outputs=2)
    index = _or_first_nan(op, index, x, axis)
    return op.GatherElements(x, index, axis=axis), index


@composite("ArgMax", ["x"], {"axis": ir.AttributeType.INT})
def argmax(op: Emitter, x: ir.Value, *, axis: AttributeRef) -> ir.Value:
    """Returns the index of the maximum along an axis, as :func:`extremum` does."""
    return _or_first_nan(op, op.ArgMax(x, axis=axis), x, axis)


@composite("ArgMin", ["x"], {"axis": ir.AttributeType.INT})
def argmin(op: Emitter, x: ir.Value, *, axis: AttributeRef) -> ir.Value:
    """Returns the index of the minimum along an axis, as :func:`extremum` does."""
    return _or_first_nan(op, op.ArgMin(x, axis=axis), x, axis)


def _or_first_nan(op: Emitter, index: ir.Value, x: ir.Value, axis: AttributeRef) -> ir.Value:
    """Returns the indices of the first NaN along an axis of x, and `index` where there is no NaN."""
    # ONNX Runtime's TopK, ArgMax and ArgMin ignore NaN, because all comparisons with it are false. The mask is float32,
    # because ArgMax has no kernel for bool.
    nans = op.Cast(op.IsNaN(x), to=ir.DataType.FLOAT)
    first = op.ArgMax(nans, axis=axis)
    has_nan = op.Cast(op.GatherElements(nans, first, axis=axis), to=ir.DataType.BOOL)
    return op.Where(has_nan, first, index)


@composite(
    "ExtremumGradient",
    ["ct", "index", "shape"],
    {"axis": ir.AttributeType.INT},
    dtypes={"index": ir.DataType.INT64, "shape": ir.DataType.INT64},
)
def extremum_gradient(
    op: Emitter, ct: ir.Value, index: ir.Value, shape: ir.Value, *, axis: AttributeRef
) -> ir.Value:
    """VJP of Extremum: ct at the elements of these indices, zeros elsewhere.

    ct and index have size 1 along the axis; shape is that of x.
    """
    return op.ScatterElements(op.Expand(op.const(0, like=ct), shape), index, ct, axis=axis)


def gather_rows(axis: int, batch_dims: int) -> CompositeOp:
    """Returns an op that reads rows along an axis: `[*lead, n, *rest]`, indices -> `[*lead, *k, *rest]`.

    Args:
        axis: the axis, non-negative. Negative indices count from its end.
        batch_dims: 0 for indices `[*k]`, which all leading entries share; `axis` for indices `[*lead, *k]`.
    """

    def body(op: Emitter, data: ir.Value, indices: ir.Value, **_: Any) -> ir.Value:
        if batch_dims:
            return op.GatherND(data, op.Unsqueeze(indices, [-1]), batch_dims=batch_dims)
        return op.Gather(data, indices, axis=axis)

    return _row_op("GatherRows", ["data", "indices"], ["axis", "batch_dims"], f"{axis} {batch_dims}", body)


def scatter_rows(axis: int, batch_dims: int, reduction: str, index_rank: int) -> CompositeOp:
    """Returns an op that reduces rows into a table along an axis, one update after the other.

    Inputs: data `[*lead, n, *rest]`; indices, as those of :func:`gather_rows`; updates `[*lead, *k, *rest]`. ONNX
    Runtime's `max` and `min` (1.32) may lose NaN; the native kernel returns NaN, as ONNX defines.

    Args:
        axis: the axis, non-negative. Negative indices count from its end.
        batch_dims: number of axes before `axis` that the indices have too, 0 or `axis`.
        reduction: one of `REDUCTIONS`. With "none", the last update of a row is kept.
        index_rank: rank of the indices.
    """

    def body(op: Emitter, data: ir.Value, indices: ir.Value, updates: ir.Value, **_: Any) -> ir.Value:
        places = _coordinates(op, data, indices, axis, batch_dims, index_rank)
        return op.ScatterND(data, places, updates, reduction=reduction)

    return _row_op(
        "ScatterRows",
        ["data", "indices", "updates"],
        ["axis", "batch_dims", "reduction"],
        f"{axis} {batch_dims} {reduction} {index_rank}",
        body,
    )


def _coordinates(
    op: Emitter, data: ir.Value, indices: ir.Value, axis: int, batch_dims: int, index_rank: int
) -> ir.Value:
    """Returns the indices of all rows along the axes up to `axis`, as ScatterND reads them: `[*lead, *k, axis + 1]`."""
    if axis == 0:
        return op.Unsqueeze(indices, [-1])
    rank = axis + index_rank - batch_dims
    shape = op.Concat(op.Shape(data, start=0, end=axis), op.Shape(indices, start=batch_dims), axis=0)
    columns = [
        op.Reshape(
            op.Range(0, op.Squeeze(op.dim(data, lead)), 1), [1] * lead + [-1] + [1] * (rank - lead - 1)
        )
        for lead in range(axis)
    ]
    return op.Concat(*(op.Unsqueeze(op.Expand(c, shape), [-1]) for c in (*columns, indices)), axis=-1)


def _row_op(name: str, inputs: list[str], attributes: list[str], key: str, body: Any) -> CompositeOp:
    return SpecializedOp(
        name,
        dict.fromkeys(inputs),
        dict.fromkeys(attributes, ir.AttributeType.INT),
        1,
        key,
        body,
        dtypes={"indices": ir.DataType.INT64},
    )


@composite("Transpose", ["x"], {"perm": ir.AttributeType.INTS})
def transpose(op: Emitter, x: ir.Value, *, perm: AttributeRef) -> ir.Value:
    """Returns a tensor with its axes in another order, as ONNX's Transpose does."""
    return op.Transpose(x, perm=perm)
