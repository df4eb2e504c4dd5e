"""Adding a cotangent back to the positions that its primal was read from."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import Emitter

__all__ = ["positions", "scatter_nd", "scatter_to"]


def positions(op: Emitter, value: ir.Value) -> ir.Value:
    """Returns the flat position of every element of `value`: int64, of its shape.

    Applied to these, an op that only moves elements (Slice, Pad, Compress, ...) tells where each element of its
    output came from, whatever its attributes and whatever is symbolic.
    """
    count = op.Range(0, op.Size(value), 1)
    return op.Reshape(count, op.shape_of(value), allowzero=1)  # type: ignore[no-any-return]


def scatter_to(op: Emitter, ct: ir.Value, where: ir.Value, like: ir.Value) -> ir.Value:
    """Returns zeros of the shape of `like` with each element of `ct` added at its flat position in `where`."""
    index = op.Reshape(where, [-1, 1])
    flat = scatter_nd(op, op.Reshape(op.Size(like), [1]), index, op.Reshape(ct, [-1]))
    return op.reshape_like(flat, like)


def scatter_nd(op: Emitter, shape: ir.Value, indices: ir.Value, updates: ir.Value) -> ir.Value:
    """Returns zeros of `shape` with `updates` added by ScatterND.

    Half precision is summed in float32, for accuracy and because the CPU has no other kernel.
    """
    narrow = updates.dtype if updates.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) else None
    if narrow is not None:
        updates = op.Cast(updates, to=ir.DataType.FLOAT)
    zeros = op.Expand(op.const(0, like=updates), shape)
    total = op.ScatterND(zeros, indices, updates, reduction="add")
    return op.Cast(total, to=narrow) if narrow is not None else total  # type: ignore[no-any-return]
