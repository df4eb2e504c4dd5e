"""Lowers comparisons, and logical and bitwise ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxtrain.ortmodule.lowering._table import DTYPES, Lowering, is_float, lower

BOOL = ir.DataType.BOOL


def as_bool(low: Lowering, x: Any) -> ir.Value:
    """Converts a tensor or Python number to bool: true where it is nonzero."""
    return low.tensor(x, BOOL) if isinstance(x, ir.Value) else low.op.const(bool(x), BOOL)


def promoted(low: Lowering, a: Any, b: Any) -> tuple[ir.Value, ir.Value]:
    """Returns the operands of a comparison in the dtype to which PyTorch promotes them."""
    dtype = torch.result_type(*(_promotion_example(low.fake(index)) for index in (0, 1)))
    if dtype not in DTYPES:
        raise low.unsupported(f"a comparison of {dtype}")
    return low.tensor(a, DTYPES[dtype]), low.tensor(b, DTYPES[dtype])


def _promotion_example(fake: Any) -> Any:
    """Returns a value that promotes like `fake`: 1 for a SymInt, 1.0 for a SymFloat, any other `fake` unchanged."""
    if isinstance(fake, torch.SymInt):
        return 1
    return 1.0 if isinstance(fake, torch.SymFloat) else fake


def _comparison(name: str) -> Callable[..., ir.Value]:
    onnx_ops = {"eq": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual"}

    def compare(low: Lowering, a: Any, b: Any) -> ir.Value:
        left, right = promoted(low, a, b)
        if left.dtype == BOOL and name not in ("eq", "ne"):
            # ONNX's Less and Greater do not support bool.
            left, right = low.tensor(left, ir.DataType.INT32), low.tensor(right, ir.DataType.INT32)
        if name == "ne":
            return low.op.Not(low.op.Equal(left, right))
        return low.op.emit(onnx_ops[name], left, right)

    return compare


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    lower(f"aten.{_name}.Tensor", f"aten.{_name}.Scalar")(_comparison(_name))


@lower("aten.logical_and.default", "aten.logical_or.default", "aten.logical_xor.default")
def logical(low: Lowering, a: ir.Value, b: ir.Value) -> ir.Value:
    op_type = str(low.node.target).split(".")[1].removeprefix("logical_").capitalize()
    return low.op.emit(op_type, as_bool(low, a), as_bool(low, b))


@lower("aten.logical_not.default")
def logical_not(low: Lowering, x: ir.Value) -> ir.Value:
    return low.op.Not(as_bool(low, x))


def _bitwise(kind: str) -> Callable[..., ir.Value]:
    def bitwise(low: Lowering, a: Any, b: Any) -> ir.Value:
        a, b = low.tensors(a, b)
        return low.op.emit(kind if low.dtype == BOOL else f"Bitwise{kind}", a, b)

    return bitwise


for _name in ("and", "or", "xor"):
    lower(*(f"aten.bitwise_{_name}.{kind}" for kind in ("Tensor", "Scalar", "Scalar_Tensor")))(
        _bitwise(_name.capitalize())
    )


@lower("aten.bitwise_not.default")
def bitwise_not(low: Lowering, x: ir.Value) -> ir.Value:
    return low.op.Not(x) if low.dtype == BOOL else low.op.BitwiseNot(x)


@lower("aten.isnan.default", "aten.isinf.default")
def isnan_or_isinf(low: Lowering, x: ir.Value) -> ir.Value:
    if not is_float(x):
        # ONNX's IsNaN and IsInf support floating-point tensors only.
        return low.op.Expand(low.op.const(False), low.op.shape_of(x))
    return low.op.IsNaN(x) if "isnan" in str(low.node.target) else low.op.IsInf(x)


@lower("aten.__lshift__.Scalar", "aten.__lshift__.Tensor")
@lower(*(f"aten.bitwise_left_shift.{kind}" for kind in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")))
def left_shift(low: Lowering, a: Any, b: Any) -> ir.Value:
    """Lowers to a * 2^b modulo 2^64. The result is 0 where b is negative or at least 64."""
    # Not BitShift, which ONNX defines for unsigned integers only.
    x, factor, inside = _shift_operands(low, a, b)
    return low.op.Where(inside, low.op.Mul(x, factor), 0)


@lower("aten.__rshift__.Scalar", "aten.__rshift__.Tensor")
@lower(*(f"aten.bitwise_right_shift.{kind}" for kind in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")))
def right_shift(low: Lowering, a: Any, b: Any) -> ir.Value:
    """Lowers to floor(a / 2^b), an arithmetic right shift.

    Where b is negative or at least 64, the result is -1 for negative a, else 0.
    """
    op = low.op
    x, factor, inside = _shift_operands(low, a, b)
    is_negative = op.Less(x, 0)
    # Integer Div truncates. For negative x, it is applied to the bitwise complement -1 - x, and the result is
    # complemented.
    non_negative = op.Where(is_negative, op.Sub(-1, x), x)
    shifted = op.Where(op.And(inside, op.Greater(factor, 0)), op.Div(non_negative, factor), 0)
    return op.Where(is_negative, op.Sub(-1, shifted), shifted)


def _shift_operands(low: Lowering, a: Any, b: Any) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Converts the operands of a bit shift of `a` by `b`.

    Returns:
        `a` as int64, the power 2^b (2^63 wraps around to the lowest integer), and a mask that is true where
        0 <= b < 64.
    """
    op = low.op
    if low.dtype.is_floating_point():
        raise low.unsupported("floating-point numbers")
    x, bits = (low.tensor(value, ir.DataType.INT64) for value in (a, b))
    powers = np.left_shift(np.int64(1), np.arange(64, dtype=np.int64))
    inside = op.And(op.GreaterOrEqual(bits, 0), op.Less(bits, 64))
    return x, op.Gather(op.const(powers), op.Where(inside, bits, 0)), inside
