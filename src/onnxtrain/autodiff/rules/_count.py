"""Divides values by element counts, without overflow or loss of precision if the values are half precision."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import Emitter

_EXACT = 1024
"""Largest divisor whose reciprocal is a normal float16 number; smaller reciprocals are subnormal and lose digits."""


def counting_dtype(value: ir.Value) -> ir.DataType:
    """Returns the dtype in which to count elements for dividing `value`: float64 if it is float64, else float32."""
    # Counting in half precision fails: float16 ends at 65504, and bfloat16 represents integers only up to 256.
    return ir.DataType.DOUBLE if value.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT


def divide_by_count(op: Emitter, value: ir.Value, count: int | ir.Value) -> ir.Value:
    """Returns value / count, in the dtype of `value`.

    Args:
        op: emitter.
        value: the dividend, floating point.
        count: the divisor: an integer (0 is treated as 1), or a value with the dtype `counting_dtype(value)`.
    """
    wide = counting_dtype(value)
    if isinstance(count, int):
        # Mul is cheaper than Div, and the reciprocal is accurate enough in the wide dtypes.
        if value.dtype == wide or count <= _EXACT:
            return op.Mul(value, 1 / max(count, 1))
        count = op.const(count, wide)
    if value.dtype == wide:
        return op.Div(value, count)
    return op.Cast(op.Div(op.Cast(value, to=wide), count), to=value.dtype)
