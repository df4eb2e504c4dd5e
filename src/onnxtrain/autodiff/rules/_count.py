"""Divides by a number of elements without leaving the range of half precision."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import Emitter

_EXACT = 1024
"""Largest divisor whose reciprocal is a normal number of float16; smaller fractions are subnormal, with few digits."""


def counting_dtype(value: ir.Value) -> ir.DataType:
    """Returns the dtype for the number of elements that `value` is divided by: float64 or float32."""
    # Not the dtype of `value`: float16 ends at 65504, and bfloat16 has integers up to 256 only.
    return ir.DataType.DOUBLE if value.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT


def divide_by_count(op: Emitter, value: ir.Value, count: int | ir.Value) -> ir.Value:
    """Returns value / count, in the dtype of `value`.

    Args:
        op: emitter.
        value: the dividend, floating point.
        count: a number known when the graph is built (0 stands for 1), or a value of :func:`counting_dtype`.
    """
    wide = counting_dtype(value)
    if isinstance(count, int):
        # A product is cheaper than a division, and the reciprocal is exact enough in the wide dtypes.
        if value.dtype == wide or count <= _EXACT:
            return op.Mul(value, 1 / max(count, 1))
        count = op.const(count, wide)
    if value.dtype == wide:
        return op.Div(value, count)
    return op.Cast(op.Div(op.Cast(value, to=wide), count), to=value.dtype)
