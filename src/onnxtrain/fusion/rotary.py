"""Defines the fusion of rotary position embeddings, which models spell out in standard ops."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import static_dims
from onnxtrain.functions import rotary
from onnxtrain.fusion._pass import Fusion
from onnxtrain.fusion._patterns import Match, op, value
from onnxtrain.fusion._windows import window_of
from onnxtrain.passes import broadcasts_to, same_size


def _rotates(last: ir.Node, match: Match) -> bool:
    """True if `low` and `high` are the halves of each row of a float32 x, and cos and sin broadcast to x."""
    x, angles = match["x"], (match["cos"], match["sin"])
    dims = static_dims(x) if x.dtype == ir.DataType.FLOAT else None
    size = dims[-1] if dims else None
    if not size or any(not _broadcasts(angle, x) for angle in angles) or angles[0].shape != angles[1].shape:
        return False
    return all(_half_of(match[name], x, size) == place for place, name in enumerate(("low", "high")))


def _half_of(half: ir.Value, x: ir.Value, size: int) -> int | None:
    """Returns which half of the last axis of x a value is, 0 or 1; None if it is something else."""
    node, dims = half.producer(), static_dims(half)
    if node is None or size % 2 or dims is None or dims[-1] != size // 2:
        return None
    if (node.op_type, node.domain) == ("Split", ""):
        axis = node.attributes.get_int("axis", 0)
        of_last = axis in (-1, len(dims) - 1) and node.inputs[0] is x and len(node.outputs) == 2
        return node.outputs.index(half) if of_last else None
    window = window_of(node)
    if window is None or window.source is not x or window.axis != 1 or window.offset not in (0, size // 2):
        return None
    return 1 if window.offset else 0


def _broadcasts(angle: ir.Value, x: ir.Value) -> bool:
    """True if a tensor has the dtype of x and broadcasts to its shape, but not along the last axis."""
    if not angle.shape or not x.shape or angle.dtype != x.dtype:
        return False
    return same_size(angle.shape[-1], x.shape[-1]) and broadcasts_to(tuple(angle.shape), tuple(x.shape))


def _of_the_last_axis(concat: ir.Node) -> dict[str, ir.Value] | None:
    shape = concat.outputs[0].shape
    axis = concat.attributes.get_int("axis")
    return {} if shape is not None and axis in (-1, len(shape) - 1) else None


_x = value("x")
_rotated = op.Concat(op.Neg(value("high")), value("low"), where=_of_the_last_axis)

ROTARY = Fusion(
    composite=rotary,
    pattern=op.Add(op.Mul(_x, value("cos")), op.Mul(_rotated, value("sin"))),
    where=_rotates,
)
"""x * cos + concat(-high, low) * sin, with the halves low and high of x."""
