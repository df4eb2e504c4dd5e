"""Lowers functions of square matrices: determinants, exponentials."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.ortmodule.lowering._table import Lowering, lower

_MOST_ROWS = 16
_EXPONENTS = (0, 6, 12, 18, 24)
"""Powers of two to scale rows by, see `_scale`."""

_SQUARINGS = 20
"""Square at most this often: exp(A) of a matrix of norm 2^20 overflows, except for nilpotent and skew matrices."""
_DEGREE = 16
"""Degree of the Taylor polynomial, which for a norm of at most 1 is exact to 1 / 17! = 3e-15."""


@lower("aten._linalg_slogdet.default")
def slogdet(low: Lowering, a: ir.Value) -> tuple[ir.Value | None, ...]:
    """Lowers to sign and logarithm of the determinant of the matrix with rows of length 1.

    That determinant cannot overflow. It may be too small for float32, so the rows are multiplied by a power of two. If
    the pivots are 1 or rounding errors of 2^-24, some power suits 16 rows; with more rows the products on the way may
    overflow.
    """
    if low.uses_result(2) or low.uses_result(3):
        raise low.unsupported("readers of the factors")
    op = low.op
    # The rule of Det writes its gradient for one size.
    size = int(low.fake(0).shape[-1])
    if size > _MOST_ROWS:
        raise low.unsupported(f"matrices of more than {_MOST_ROWS} rows")
    lengths = low.op.stop_gradient(op.ReduceL2(a, [-1], keepdims=1))
    lengths = op.Where(op.Equal(lengths, 0.0), 1.0, lengths)
    lengths = op.Div(lengths, _scale(low, op.Div(a, lengths)))
    rows = op.Div(a, lengths)
    rows.shape = low.shape(low.fake(0))
    determinant = op.Det(rows)
    volume = op.Add(op.Log(op.Abs(determinant)), op.ReduceSum(op.Log(lengths), [-2, -1], keepdims=0))
    return low.op.stop_gradient(op.Sign(determinant)), volume, None, None


def _scale(low: Lowering, rows: ir.Value) -> ir.Value:
    """Returns per matrix, [*, 1, 1], the first power of two for which the determinant is a normal number, or 1."""
    op = low.op
    scale = op.const(1.0, low.dtype)
    for exponent in reversed(_EXPONENTS):
        determinant = op.Abs(op.Det(op.Mul(rows, 2.0**exponent)))
        is_normal = op.And(op.GreaterOrEqual(determinant, 2.0**-100), op.Less(determinant, math.inf))
        scale = op.Where(op.Unsqueeze(is_normal, [-2, -1]), 2.0**exponent, scale)
    return low.op.stop_gradient(scale)


@lower("aten.linalg_matrix_exp.default")
def matrix_exp(low: Lowering, a: ir.Value) -> ir.Value:
    """Lowers to a Taylor polynomial of A / 2^s, squared s times.

    The number s is computed at run time for each matrix: it brings the 1-norm to 1 or below. See Higham, SIAM J. Matrix
    Anal. Appl. 26 (2005), 1179-1193.
    """
    op = low.op
    size = int(low.fake(0).shape[-1])
    norm = low.op.stop_gradient(op.ReduceMax(op.ReduceSum(op.Abs(a), [-2], keepdims=1), [-1], keepdims=1))
    squarings = op.Ceil(op.Div(op.Log(op.Max(norm, 1.0)), math.log(2)))
    squarings = op.Min(squarings, float(_SQUARINGS))
    x = op.Div(a, op.Pow(op.const(2.0, low.dtype), squarings))
    result = _exponential_of_small(low, x, op.const(np.eye(size), low.dtype))
    for step in range(_SQUARINGS):
        more = op.Greater(squarings, float(step))
        # The square of a matrix that is complete may overflow, and its gradient would be NaN behind the Where.
        factor = op.Where(more, result, 0.0)
        result = op.Where(more, op.MatMul(factor, factor), result)
    return result


def _exponential_of_small(low: Lowering, x: ir.Value, identity: ir.Value) -> ir.Value:
    """Returns the Taylor polynomial in powers of x⁴, with polynomials of degree 3 as coefficients."""
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
