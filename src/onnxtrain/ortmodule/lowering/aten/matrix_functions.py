"""Lowers slogdet and matrix_exp."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.ortmodule.lowering._table import Lowering, lower

_MAX_ROWS = 16
"""Maximum size of the matrices of slogdet."""

_EXPONENTS = (0, 6, 12, 18, 24)
"""Exponents of the powers of two by which `_scale` may multiply a matrix."""

_SQUARINGS = 20
"""Maximum number of squarings. For norms above 2^20, exp(A) overflows, except for e.g. nilpotent or skew matrices."""

_DEGREE = 16
"""Degree of the Taylor polynomial. For a norm of at most 1, its error is about 1 / 17! = 3e-15."""


@lower("aten._linalg_slogdet.default")
def slogdet(low: Lowering, a: ir.Value) -> tuple[ir.Value | None, ...]:
    """Lowers to the sign of the determinant and the logarithm of its absolute value.

    The rows are normalized to length 1, so that the determinant cannot overflow. It may still underflow in float32, so
    the normalized rows are multiplied by a power of two. For up to 16 rows, one of the powers in `_EXPONENTS` works,
    even if each pivot is 1 or a rounding error of 2^-24. Larger matrices are not supported, because intermediate
    products may overflow.
    """
    if low.uses_result(2) or low.uses_result(3):
        raise low.unsupported("uses of the LU factors")
    op = low.op
    # The gradient rule of Det needs a fixed size.
    size = int(low.fake(0).shape[-1])
    if size > _MAX_ROWS:
        raise low.unsupported(f"matrices of more than {_MAX_ROWS} rows")
    lengths = low.op.stop_gradient(op.ReduceL2(a, [-1], keepdims=1))
    lengths = op.Where(op.Equal(lengths, 0.0), 1.0, lengths)
    lengths = op.Div(lengths, _scale(low, op.Div(a, lengths)))
    rows = op.Div(a, lengths)
    rows.shape = low.shape(low.fake(0))
    determinant = op.Det(rows)
    volume = op.Add(op.Log(op.Abs(determinant)), op.ReduceSum(op.Log(lengths), [-2, -1], keepdims=0))
    return low.op.stop_gradient(op.Sign(determinant)), volume, None, None


def _scale(low: Lowering, rows: ir.Value) -> ir.Value:
    """Returns the factor, [*, 1, 1], by which to multiply each matrix so that its determinant does not underflow.

    It is the first power of two in `_EXPONENTS` that keeps the determinant between 2^-100 and infinity, or 1 if none
    does.
    """
    op = low.op
    scale = op.const(1.0, low.dtype)
    for exponent in reversed(_EXPONENTS):
        determinant = op.Abs(op.Det(op.Mul(rows, 2.0**exponent)))
        is_normal = op.And(op.GreaterOrEqual(determinant, 2.0**-100), op.Less(determinant, math.inf))
        scale = op.Where(op.Unsqueeze(is_normal, [-2, -1]), 2.0**exponent, scale)
    return low.op.stop_gradient(scale)


@lower("aten.linalg_matrix_exp.default")
def matrix_exp(low: Lowering, a: ir.Value) -> ir.Value:
    """Lowers to scaling and squaring: the Taylor polynomial of A / 2^s, squared s times.

    s is computed at run time, per matrix, so that the 1-norm of A / 2^s is at most 1. See Higham, SIAM J. Matrix Anal.
    Appl. 26 (2005), 1179-1193.
    """
    op = low.op
    size = int(low.fake(0).shape[-1])
    norm = low.op.stop_gradient(op.ReduceMax(op.ReduceSum(op.Abs(a), [-2], keepdims=1), [-1], keepdims=1))
    squarings = op.Ceil(op.Div(op.Log(op.Max(norm, 1.0)), math.log(2)))
    squarings = op.Min(squarings, float(_SQUARINGS))
    x = op.Div(a, op.Pow(op.const(2.0, low.dtype), squarings))
    result = _taylor_exp(low, x, op.const(np.eye(size), low.dtype))
    for step in range(_SQUARINGS):
        more = op.Greater(squarings, float(step))
        # Squaring a finished result could overflow, which would make its gradient NaN despite the Where.
        factor = op.Where(more, result, 0.0)
        result = op.Where(more, op.MatMul(factor, factor), result)
    return result


def _taylor_exp(low: Lowering, x: ir.Value, identity: ir.Value) -> ir.Value:
    """Returns the Taylor polynomial of exp(x), by Horner's rule in x⁴ with polynomials of degree 3 as coefficients."""
    op = low.op
    square = op.MatMul(x, x)
    powers: list[Any] = [identity, x, square, op.MatMul(square, x)]
    fourth = op.MatMul(square, square)
    result = op.Mul(identity, 1 / math.factorial(_DEGREE))
    for first in range(_DEGREE - 4, -1, -4):
        result = op.MatMul(result, fourth)
        for degree, power in enumerate(powers):
            result = op.Add(result, op.Mul(power, 1 / math.factorial(first + degree)))
    return result
