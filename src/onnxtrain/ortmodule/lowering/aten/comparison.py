"""Lowers comparisons, logic and operations on bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxtrain.ortmodule.lowering._table import DTYPES, Lowering, is_float, lower

BOOL = ir.DataType.BOOL


def as_bool(low: Lowering, x: Any) -> ir.Value:
    """Returns a tensor or number as bool: true where it is not zero."""
    return low.tensor(x, BOOL) if isinstance(x, ir.Value) else low.op.const(bool(x), BOOL)


def compared(low: Lowering, a: Any, b: Any) -> tuple[ir.Value, ir.Value]:
    """Returns both operands of a comparison in PyTorch's common dtype for them."""
    fakes = [_stand_in(low.fake(index)) for index in (0, 1)]
    dtype = torch.result_type(*fakes)
    if dtype not in DTYPES:
        raise low.unsupported(f"a comparison of {dtype}")
    return low.tensor(a, DTYPES[dtype]), low.tensor(b, DTYPES[dtype])


def _stand_in(fake: Any) -> Any:
    """Returns a value with the type promotion of a fake one: a Python number in place of a symbolic one."""
    if isinstance(fake, torch.SymInt):
        return 1
    return 1.0 if isinstance(fake, torch.SymFloat) else fake


def _comparison(name: str) -> Callable[..., ir.Value]:
    onnx_ops = {"eq": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual"}

    def compare(low: Lowering, a: Any, b: Any) -> ir.Value:
        left, right = compared(low, a, b)
        if left.dtype == BOOL and name not in ("eq", "ne"):
            # ONNX defines the order of numbers only, not of bool.
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
def is_special(low: Lowering, x: ir.Value) -> ir.Value:
    if not is_float(x):
        # ONNX's IsNaN and IsInf take floating-point tensors only.
        return low.op.Expand(low.op.const(False), low.op.shape_of(x))
    return low.op.IsNaN(x) if "isnan" in str(low.node.target) else low.op.IsInf(x)


@lower("aten.isin.Tensor_Tensor")
def isin(
    low: Lowering, x: ir.Value, among: ir.Value, *, assume_unique: bool = False, invert: bool = False
) -> ir.Value:
    op = low.op
    left, right = compared(low, x, among)
    # Compares each element with each: [*shape of x, size of among].
    equal = op.Equal(op.Unsqueeze(left, [-1]), op.Reshape(right, [-1]))
    # A sum, because an empty `among` has no maximum.
    is_in = op.Greater(op.ReduceSum(op.Cast(equal, to=ir.DataType.FLOAT), [-1], keepdims=0), 0.0)
    return op.Not(is_in) if invert else is_in


@lower("aten.__lshift__.Scalar", "aten.__lshift__.Tensor")
@lower(*(f"aten.bitwise_left_shift.{kind}" for kind in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")))
def left_shift(low: Lowering, a: Any, b: Any) -> ir.Value:
    """Lowers a * 2^b, of which the lowest bits are kept; 0 where b is negative or at least the number of bits."""
    # Not BitShift, which ONNX defines for unsigned integers only.
    x, factor, inside = _shift_operands(low, a, b)
    return low.op.Where(inside, low.op.Mul(x, factor), 0)


@lower("aten.__rshift__.Scalar", "aten.__rshift__.Tensor")
@lower(*(f"aten.bitwise_right_shift.{kind}" for kind in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")))
def right_shift(low: Lowering, a: Any, b: Any) -> ir.Value:
    """Lowers floor(a / 2^b); only the sign is left where b is negative or at least the number of bits."""
    op = low.op
    x, factor, inside = _shift_operands(low, a, b)
    below = op.Less(x, 0)
    # ONNX's division of integers rounds towards zero. -1 - x is the complement of x, so that the division rounds down.
    size = op.Where(below, op.Sub(-1, x), x)
    shifted = op.Where(op.And(inside, op.Greater(factor, 0)), op.Div(size, factor), 0)
    return op.Where(below, op.Sub(-1, shifted), shifted)


def _shift_operands(low: Lowering, a: Any, b: Any) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Returns a in int64, 2^b, and where b is between 0 and 63. 2^63 wraps around to the least integer."""
    op = low.op
    if low.dtype.is_floating_point():
        raise low.unsupported("floating-point numbers")
    x, bits = (low.tensor(value, ir.DataType.INT64) for value in (a, b))
    powers = np.left_shift(np.int64(1), np.arange(64, dtype=np.int64))
    inside = op.And(op.GreaterOrEqual(bits, 0), op.Less(bits, 64))
    return x, op.Gather(op.const(powers), op.Where(inside, bits, 0)), inside
