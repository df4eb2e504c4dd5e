"""Scatters a cotangent back to the positions from which its primal was read."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.emitter import Emitter


def positions(op: Emitter, value: ir.Value) -> ir.Value:
    """Returns the flat index of every element of `value`: int64, with the shape of `value`.

    Applying an op that only moves elements (Slice, Pad, Compress, ...) to these indices shows where each output element
    came from, without knowing the op's attributes or static sizes.
    """
    count = op.Range(0, op.Size(value), 1)
    return op.Reshape(count, op.shape_of(value), allowzero=1)


def scatter_to(op: Emitter, ct: ir.Value, where: ir.Value, like: ir.Value) -> ir.Value:
    """Returns zeros with the shape of `like`, with each element of `ct` added at its flat index `where`."""
    # ScatterND into a vector: the indices have one column.
    index = op.Reshape(where, [-1, 1])
    flat = scatter_nd(op, op.Reshape(op.Size(like), [1]), index, op.Reshape(ct, [-1]))
    return op.reshape_like(flat, like)


def scatter_nd(op: Emitter, shape: ir.Value, indices: ir.Value, updates: ir.Value) -> ir.Value:
    """Returns zeros of shape `shape` with `updates` added by ScatterND."""
    return _summed(
        op, shape, updates, lambda zeros, wide: op.ScatterND(zeros, indices, wide, reduction="add")
    )


def scatter_elements(
    op: Emitter, shape: ir.Value, indices: ir.Value, updates: ir.Value, axis: int
) -> ir.Value:
    """Returns zeros of shape `shape` with `updates` added by ScatterElements."""

    def scatter(zeros: ir.Value, wide: ir.Value) -> ir.Value:
        return op.ScatterElements(zeros, indices, wide, axis=axis, reduction="add")

    return _summed(op, shape, updates, scatter)


def _summed(
    op: Emitter, shape: ir.Value, updates: ir.Value, scatter: Callable[[ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    """Scatters into zeros of shape `shape`; half precision is accumulated in float32."""
    # Sums in float16 lose precision, and ONNX Runtime's CPU provider has no half-precision kernels for reduction="add".
    dtype = updates.dtype
    narrow = dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    wide = op.Cast(updates, to=ir.DataType.FLOAT) if narrow else updates
    total = scatter(op.Expand(op.const(0, like=wide), shape), wide)
    return op.Cast(total, to=dtype) if narrow else total
