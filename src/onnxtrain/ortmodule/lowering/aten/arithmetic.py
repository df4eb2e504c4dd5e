"""Lowers elementwise arithmetic: add, mul, div, remainder, pow and their relatives."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxtrain.emitter import Emitter
from onnxtrain.ortmodule.lowering._table import Lowering, is_float, lower
from onnxtrain.passes import known_array


def _operands(low: Lowering, *values: Any) -> tuple[ir.Value, ...]:
    """Casts the operands to the result's dtype, or to int32 for bool, because ONNX's Add and Mul don't support bool."""
    dtype = ir.DataType.INT32 if low.dtype == ir.DataType.BOOL else low.dtype
    return tuple(low.tensor(value, dtype) for value in values)


def _factors(low: Lowering, a: Any, b: Any) -> tuple[ir.Value, ...]:
    """Casts the operands of a product or quotient to the dtype in which it is computed.

    This is float32 for a half-precision tensor and a Python float, and otherwise the dtype that `_operands` chooses.
    """
    # PyTorch rounds only the result to the narrow dtype, not the Python number.
    has_number = any(isinstance(low.fake(index), float | torch.SymFloat) for index in range(2))
    if has_number and low.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        return low.tensor(a, ir.DataType.FLOAT), low.tensor(b, ir.DataType.FLOAT)
    return _operands(low, a, b)


def _scaled_operands(low: Lowering, a: Any, b: Any, alpha: Any) -> tuple[ir.Value, ir.Value]:
    """Returns a and alpha * b."""
    if isinstance(alpha, float) and not low.dtype.is_floating_point():
        raise low.unsupported(f"alpha={alpha} for integers")
    if not isinstance(alpha, ir.Value) and alpha == 1:
        a, b = _operands(low, a, b)
        return a, b
    low.refuse_overflow(alpha)
    if not low.dtype.is_floating_point():
        a, b = _operands(low, a, b)
        return a, low.op.Mul(b, low.tensor(alpha, b.dtype))
    # PyTorch rounds alpha to a narrow dtype, but alpha * b only with the sum.
    a, b = low.wide(a, b)
    return a, low.op.Mul(b, low.op.Cast(low.tensor(alpha, low.dtype), to=b.dtype))


@lower("aten.add.Tensor", "aten.add.Scalar")
def add(low: Lowering, a: Any, b: Any, alpha: Any = 1) -> ir.Value:
    return low.op.Add(*_scaled_operands(low, a, b, alpha))


@lower("aten.sub.Tensor", "aten.sub.Scalar")
def sub(low: Lowering, a: Any, b: Any, alpha: Any = 1) -> ir.Value:
    if any(getattr(low.fake(index), "dtype", None) == torch.bool for index in (0, 1)):
        raise low.unsupported("booleans")
    return low.op.Sub(*_scaled_operands(low, a, b, alpha))


@lower("aten.rsub.Tensor", "aten.rsub.Scalar")
def rsub(low: Lowering, a: Any, b: Any, alpha: Any = 1) -> ir.Value:
    return sub(low, b, a, alpha)


@lower("aten.mul.Tensor", "aten.mul.Scalar")
def mul(low: Lowering, a: Any, b: Any) -> ir.Value:
    return low.op.Mul(*_factors(low, a, b))


@lower("aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor")
def div(low: Lowering, a: Any, b: Any) -> ir.Value:
    return low.op.Div(*_factors(low, a, b))


def truncated(low: Lowering, x: ir.Value) -> ir.Value:
    """Returns `x` rounded towards zero."""
    return low.op.Mul(low.op.Sign(x), low.op.Floor(low.op.Abs(x)))


@lower("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def div_mode(low: Lowering, a: Any, b: Any, *, rounding_mode: str | None) -> ir.Value:
    if rounding_mode is None:
        return div(low, a, b)
    if rounding_mode == "floor":
        return floor_divide(low, a, b)
    a, b = low.tensors(a, b)
    if not is_float(a):
        return truncated_quotient(low.op, a, b)
    return truncated(low, low.op.Div(a, b))


def truncated_quotient(op: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    """Returns the quotient of integers, rounded towards zero. As in PyTorch, the lowest integer divided by -1 wraps."""
    divisor = known_array(b)
    if divisor is not None and not np.any(divisor == -1):
        return op.Div(a, b)
    if b.dtype is not None and not b.dtype.is_signed():
        return op.Div(a, b)
    # Processors trap when the smallest integer is divided by -1: ONNX Runtime (1.32) crashes with SIGFPE.
    negated = op.Equal(b, op.const(-1, like=b))
    # A product with -1 wraps around, and ONNX Runtime lacks Neg of int16.
    wide = ir.DataType.INT32 if a.dtype in (ir.DataType.INT8, ir.DataType.INT16) else a.dtype
    quotient = op.Div(a, _chosen(op, negated, op.const(1, like=b), b))
    negative = op.Mul(op.Cast(a, to=wide), op.const(-1, wide))
    return op.Cast(op.Where(negated, negative, op.Cast(quotient, to=wide)), to=a.dtype)


def floored_quotient(op: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    """Returns the quotient of integers, rounded down."""
    quotient = truncated_quotient(op, a, b)
    # Not (a - a mod b) / b: that difference overflows for the smallest integers.
    zero = op.const(0, like=a)
    signs_differ = op.Xor(op.Less(a, zero), op.Less(b, zero))
    inexact = op.Not(op.Equal(op.Mod(a, b, fmod=1), zero))
    return op.Sub(quotient, op.Cast(op.And(inexact, signs_differ), to=a.dtype))


def _chosen(op: Emitter, condition: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """Emits Where(condition, a, b) for integers.

    Computes int16 in int32, because ONNX Runtime's Where has no int16 kernel.
    """
    if a.dtype != ir.DataType.INT16:
        return op.Where(condition, a, b)
    wide = ir.DataType.INT32
    return op.Cast(op.Where(condition, op.Cast(a, to=wide), op.Cast(b, to=wide)), to=a.dtype)


@lower("aten.floor_divide.default", "aten.floor_divide.Scalar")
def floor_divide(low: Lowering, a: Any, b: Any) -> ir.Value:
    op = low.op
    a, b = low.tensors(a, b)
    return _floored_ratio(low, a, b) if is_float(a) else floored_quotient(op, a, b)


def _floored_ratio(low: Lowering, a: ir.Value, b: ir.Value) -> ir.Value:
    """Returns the quotient of floating-point numbers, rounded down."""
    op = low.op
    # As PyTorch does, from the exact remainder: a / b may round up to the next integer.
    rest, corrected = _fmod_and_correction(low, a, b)
    quotient = op.Div(op.Sub(a, rest), b)
    floor = op.Round(op.Sub(quotient, op.Cast(corrected, to=a.dtype)))
    if b.const_value is not None and np.all(b.const_value.numpy()):
        return floor
    # Division by zero: the remainder is NaN, but PyTorch's quotient is infinite.
    return op.Where(op.Equal(b, 0.0), op.Div(low.op.stop_gradient(a), low.op.stop_gradient(b)), floor)


def _fmod_and_correction(low: Lowering, a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Returns fmod(a, b), and a mask of the elements to which `b` must be added to get Python's `a % b`."""
    op = low.op
    remainder = op.Mod(a, b, fmod=1)
    signs_differ = op.Xor(op.Less(remainder, 0.0), op.Less(b, 0.0))
    return remainder, op.And(op.Not(op.Equal(remainder, 0.0)), signs_differ)


@lower("aten.remainder.Tensor", "aten.remainder.Scalar", "aten.remainder.Scalar_Tensor")
def remainder(low: Lowering, a: Any, b: Any) -> ir.Value:
    a, b = low.tensors(a, b)
    if not is_float(a):
        return low.op.Mod(a, b)
    op = low.op
    rest, corrected = _fmod_and_correction(low, a, b)
    result = op.Add(rest, op.Where(corrected, b, 0.0))
    return low.with_slopes(result, a, op.ones_like(result), b, op.Neg(_floored_ratio(low, a, b)))


@lower("aten.fmod.Tensor", "aten.fmod.Scalar")
def fmod(low: Lowering, a: Any, b: Any) -> ir.Value:
    op = low.op
    a, b = low.tensors(a, b)
    rest = op.Mod(a, b, fmod=1)
    if not is_float(a):
        return rest
    # As in PyTorch, from the rounded ratio, which may be the next integer.
    return low.with_slopes(rest, a, op.ones_like(rest), b, op.Neg(truncated(low, op.Div(a, b))))


@lower("aten.pow.Tensor_Scalar")
def pow_scalar(low: Lowering, x: ir.Value, exponent: Any) -> ir.Value:
    (x,) = _operands(low, x)
    if is_float(x):
        # As in PyTorch, also for -0 and minus infinity, whose powers differ from the roots; but not in float16.
        if exponent == 0.5 and low.dtype != ir.DataType.FLOAT16:
            return low.op.Sqrt(x)
        if exponent == -0.5 and low.dtype != ir.DataType.FLOAT16:
            return low.op.Reciprocal(low.op.Sqrt(x))
        return low.op.Pow(x, low.tensor(exponent, low.dtype))
    # Integer powers are computed by multiplication, which wraps around as in PyTorch. ONNX Runtime's Pow computes them
    # in float64.
    if not isinstance(exponent, int) or exponent < 0:
        raise low.unsupported(f"integers to the power {exponent!r}")
    result, square = None, x
    while exponent:
        if exponent & 1:
            result = square if result is None else low.op.Mul(result, square)
        exponent >>= 1
        square = low.op.Mul(square, square) if exponent else square
    return low.op.ones_like(x) if result is None else result


@lower("aten.pow.Tensor_Tensor", "aten.pow.Scalar")
def pow_tensor(low: Lowering, x: Any, exponent: ir.Value) -> ir.Value:
    x, exponent = low.tensors(x, exponent)
    if not is_float(x):
        raise low.unsupported("powers of integers, which ONNX Runtime computes in float64")
    return low.op.Pow(x, exponent)


@lower("aten.exp2.default")
def exp2(low: Lowering, x: ir.Value) -> ir.Value:
    return low.op.Pow(*low.tensors(2.0, x))


@lower("aten.ldexp.Tensor")
def ldexp(low: Lowering, x: ir.Value, exponent: ir.Value) -> ir.Value:
    x, exponent = low.tensors(x, exponent)
    return low.op.Mul(x, low.op.Pow(low.tensor(2.0, low.dtype), exponent))
