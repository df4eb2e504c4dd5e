"""Adds a cotangent back to the positions that its primal was read from."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.emitter import Emitter


def positions(op: Emitter, value: ir.Value) -> ir.Value:
    """Returns the flat position of every element of `value`: int64, of its shape.

    If an op that only moves elements (Slice, Pad, Compress, ...) is applied to these positions, its output says for
    each element where it came from. That needs no knowledge of the op's attributes, nor static sizes.
    """
    count = op.Range(0, op.Size(value), 1)
    return op.Reshape(count, op.shape_of(value), allowzero=1)


def scatter_to(op: Emitter, ct: ir.Value, where: ir.Value, like: ir.Value) -> ir.Value:
    """Returns zeros of the shape of `like` with each element of `ct` added at its flat position `where`."""
    # ScatterND into a vector: its indices have one column.
    index = op.Reshape(where, [-1, 1])
    flat = scatter_nd(op, op.Reshape(op.Size(like), [1]), index, op.Reshape(ct, [-1]))
    return op.reshape_like(flat, like)


def scatter_nd(op: Emitter, shape: ir.Value, indices: ir.Value, updates: ir.Value) -> ir.Value:
    """Returns zeros of `shape` with `updates` added by ScatterND."""
    return _summed(
        op, shape, updates, lambda zeros, wide: op.ScatterND(zeros, indices, wide, reduction="add")
    )


def scatter_elements(
    op: Emitter, shape: ir.Value, indices: ir.Value, updates: ir.Value, axis: int
) -> ir.Value:
    """Returns zeros of `shape` with `updates` added by ScatterElements."""

    def scatter(zeros: ir.Value, wide: ir.Value) -> ir.Value:
        return op.ScatterElements(zeros, indices, wide, axis=axis, reduction="add")

    return _summed(op, shape, updates, scatter)


def _summed(
    op: Emitter, shape: ir.Value, updates: ir.Value, scatter: Callable[[ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    """Scatters into zeros of `shape`, in float32 for half precision."""
    # Sums in float16 lose digits, and ONNX Runtime's CPU has no kernel that adds half precision.
    dtype = updates.dtype
    narrow = dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    wide = op.Cast(updates, to=ir.DataType.FLOAT) if narrow else updates
    total = scatter(op.Expand(op.const(0, like=wide), shape), wide)
    return op.Cast(total, to=dtype) if narrow else total
