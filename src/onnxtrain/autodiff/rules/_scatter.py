"""Scatters a cotangent back to the positions from which its primal was read."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.functions import embedding_gradient


def positions(op: Emitter, value: ir.Value) -> ir.Value:
    """Returns the flat index of every element of `value`: int64, with the shape of `value`.

    Applying an op that only moves elements (Slice, Pad, Compress, ...) to these indices shows where each output element
    came from, without knowing the op's attributes or static sizes.
    """
    count = op.Range(0, op.Size(value), 1)
    return op.Reshape(count, op.shape_of(value), allowzero=1)


def scatter_to(op: Emitter, ct: ir.Value, where: ir.Value, like: ir.Value) -> ir.Value:
    """Scatter-adds the elements of `ct` into zeros with the shape of `like`, at the flat indices `where`."""
    # ScatterND into a vector: the indices have one column.
    index = op.Reshape(where, [-1, 1])
    flat = scatter_nd(op, op.Reshape(op.Size(like), [1]), index, op.Reshape(ct, [-1]))
    return op.reshape_like(flat, like)


def scatter_nd(op: Emitter, shape: ir.Value, indices: ir.Value, updates: ir.Value) -> ir.Value:
    """Scatter-adds `updates` into zeros of shape `shape`, using ScatterND."""
    return _summed(
        op, shape, updates, lambda zeros, wide: op.ScatterND(zeros, indices, wide, reduction="add")
    )


def scatter_elements(
    op: Emitter, shape: ir.Value, indices: ir.Value, updates: ir.Value, axis: int
) -> ir.Value:
    """Scatter-adds `updates` into zeros of shape `shape`, using ScatterElements."""

    def scatter(zeros: ir.Value, wide: ir.Value) -> ir.Value:
        return op.ScatterElements(zeros, indices, wide, axis=axis, reduction="add")

    return _summed(op, shape, updates, scatter)


def add_rows(
    op: Emitter,
    like: ir.Value,
    axis: int,
    indices: ir.Value,
    rows: ir.Value,
    shape: ir.Value | None = None,
) -> ir.Value:
    """Scatter-adds `rows` into zeros, at positions `indices` along an axis: the cotangent of a Gather.

    Args:
        op: emitter.
        like: the tensor from which the rows were read, of known rank.
        axis: the axis that `indices` refer to, non-negative.
        indices: int64, at least one axis.
        rows: `[*shape of indices, *sizes of the other axes]`.
        shape: shape of the result. Default: the shape of `like`.
    """
    shape = op.shape_of(like) if shape is None else shape
    # Rows of a table: a composite op, because it is the gradient of an embedding. Half precision is accumulated in
    # float32.
    if axis == 0:
        half = rows.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        wide = op.Cast(rows, to=ir.DataType.FLOAT) if half else rows
        total = op.call(embedding_gradient, wide, indices, shape)
        return op.Cast(total, to=rows.dtype) if half else total
    # ScatterND is faster than ScatterElements but indexes only leading axes, so `axis` is temporarily moved to the
    # front.
    rank = len(like.shape or ())
    before, after = list(range(axis)), list(range(axis + 1, rank))
    total = scatter_nd(op, op.Gather(shape, [axis, *before, *after]), op.Unsqueeze(indices, [-1]), rows)
    return op.Transpose(total, perm=[*(i + 1 for i in before), 0, *after])


def _summed(
    op: Emitter, shape: ir.Value, updates: ir.Value, scatter: Callable[[ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    """Returns `scatter(zeros, updates)` for zeros of shape `shape`; accumulates half precision in float32."""
    # Sums in float16 lose precision, and ONNX Runtime's CPU provider has no half-precision kernels for reduction="add".
    dtype = updates.dtype
    narrow = dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    wide = op.Cast(updates, to=ir.DataType.FLOAT) if narrow else updates
    total = scatter(op.Expand(op.const(0, like=wide), shape), wide)
    return op.Cast(total, to=dtype) if narrow else total
