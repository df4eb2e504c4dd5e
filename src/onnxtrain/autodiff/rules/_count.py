"""Dividing by a number of elements."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import Emitter

__all__ = ["counting_dtype", "divide_by_count"]


def counting_dtype(value: ir.Value) -> ir.DataType:
    """Returns the dtype to count in what `value` is divided by: float16 ends at 65504, bfloat16 counts to 256."""
    return ir.DataType.DOUBLE if value.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT


def divide_by_count(op: Emitter, value: ir.Value, count: ir.Value) -> ir.Value:
    """Returns value / count, in the dtype of `value`; `count` is of :func:`counting_dtype`."""
    if value.dtype == count.dtype:
        return op.Div(value, count)  # type: ignore[no-any-return]
    return op.Cast(op.Div(op.Cast(value, to=count.dtype), count), to=value.dtype)  # type: ignore[no-any-return]
