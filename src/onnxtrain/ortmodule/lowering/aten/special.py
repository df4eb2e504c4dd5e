"""Special functions: relatives of the error function and of the gamma function, in float64 for every dtype; x log y."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.ortmodule.lowering import _formulas
from onnxtrain.ortmodule.lowering._table import Lowering, lower

Formula = Callable[[Emitter, ir.Value], ir.Value]


def _in_float64(*names: str) -> Callable[[Formula], Formula]:
    """Registers a formula as the lowering of ATen ops; the result is rounded to the dtype of the op's."""

    def register(formula: Formula) -> Formula:
        @lower(*names)
        def lowered(low: Lowering, x: ir.Value) -> ir.Value:
            return formula(low.op, low.tensor(x, ir.DataType.DOUBLE))

        return formula

    return register


@_in_float64("aten.erfc.default", "aten.special_erfc.default")
def erfc(op: Emitter, x: ir.Value) -> ir.Value:
    """1 - erf(x) below 1, exp(-x²) erfcx(x) from there on."""
    low = op.Less(x, 1.0)
    far = op.Where(low, 1.0, x)
    tail = op.Mul(op.Exp(op.Neg(op.Mul(far, far))), _formulas.erfcx(op, far))
    return op.Where(low, op.Sub(1.0, op.Erf(x)), tail)


@_in_float64("aten.special_erfcx.default")
def erfcx(op: Emitter, x: ir.Value) -> ir.Value:
    """exp(x²) erfc(x)."""
    low = op.Less(x, 1.0)
    near, far = op.Where(low, x, 0.0), op.Where(low, 1.0, x)
    scaled = op.Mul(op.Exp(op.Mul(near, near)), op.Sub(1.0, op.Erf(near)))
    return op.Where(low, scaled, _formulas.erfcx(op, far))


@_in_float64("aten.special_log_ndtr.default")
def log_ndtr(op: Emitter, x: ir.Value) -> ir.Value:
    """log(erfcx(-x / sqrt(2)) / 2) - x² / 2 below -1, log1p(-erfc(x / sqrt(2)) / 2) from there on."""
    low = op.Less(x, -1.0)
    below, above = op.Where(low, x, -1.0), op.Where(low, 0.0, x)
    tail = op.Log(op.Mul(erfcx(op, op.Mul(below, -math.sqrt(0.5))), 0.5))
    tail = op.Sub(tail, op.Mul(op.Mul(below, below), 0.5))
    rest = _formulas.log1p(op, op.Mul(erfc(op, op.Mul(above, math.sqrt(0.5))), -0.5))
    return op.Where(low, tail, rest)


@_in_float64("aten.erfinv.default", "aten.special_erfinv.default")
def erfinv(op: Emitter, x: ir.Value) -> ir.Value:
    """The y with erf(y) = x; odd. Abs and Sign have no slope at 0, where erfinv has one."""
    negative = op.Less(x, 0.0)
    size = op.Where(negative, op.Neg(x), x)
    y = _positive_erfinv(op, size, op.Sub(1.0, size))
    return op.Where(negative, op.Neg(y), y)


@_in_float64("aten.special_ndtri.default")
def ndtri(op: Emitter, p: ir.Value) -> ir.Value:
    """The quantile of the normal distribution, sqrt(2) erfinv(2 p - 1)."""
    upper = op.Greater(p, 0.5)
    rest = op.Mul(op.Where(upper, op.Sub(1.0, p), p), 2.0)
    size = op.Mul(_positive_erfinv(op, op.Sub(1.0, rest), rest), math.sqrt(2))
    return op.Where(upper, size, op.Neg(size))


def _positive_erfinv(op: Emitter, x: ir.Value, rest: ir.Value) -> ir.Value:
    """Erfinv of x >= 0, where rest = 1 - x, by two steps of Halley's method.

    They start from the power series, or from Winitzki's approximation; both are good to 2e-3. Near 1 they solve
    erfc(y) = rest.
    """
    small = op.Less(x, 0.5)
    near, far = op.Where(small, x, 0.0), op.Where(small, 0.5, rest)
    inside = op.And(op.Greater(far, 0.0), op.LessOrEqual(far, 1.0))
    far = op.Where(inside, far, 0.5)
    square = op.Mul(near, near)
    series = op.Add(op.Mul(square, op.Add(op.Mul(square, 7 * math.pi**2 / 480), math.pi / 12)), 1.0)
    start = op.Mul(op.Mul(near, series), math.sqrt(math.pi) / 2)
    log = op.Log(op.Mul(far, op.Sub(2.0, far)))
    half = op.Add(op.Mul(log, 0.5), 2 / (math.pi * 0.147))
    winitzki = op.Sqrt(op.Sub(op.Sqrt(op.Sub(op.Mul(half, half), op.Div(log, 0.147))), half))
    y = op.Where(small, start, winitzki)
    for _ in range(2):
        missed = op.Where(small, op.Sub(op.Erf(y), near), op.Sub(far, erfc(op, y)))
        step = op.Mul(op.Mul(missed, op.Exp(op.Mul(y, y))), math.sqrt(math.pi) / 2)
        y = op.Sub(y, op.Div(step, op.Add(op.Mul(y, step), 1.0)))
    outside = op.Where(op.Equal(rest, 0.0), math.inf, op.const(math.nan, like=x))
    # The slope is infinite at 1, and not a number beyond.
    right = op.Or(small, inside)
    return op.Mul(op.Where(right, 1.0, outside), op.Where(right, y, x))


_SHIFT = 8
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
"""B(2n) / (2n (2n - 1)), n = 1, 2, ...; Bernoulli numbers B."""
_DIGAMMA = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)
"""B(2n) / (2n)."""


def _series(op: Emitter, square: ir.Value, coefficients: tuple[float, ...]) -> ir.Value:
    total = op.const(coefficients[-1], like=square)
    for coefficient in reversed(coefficients[:-1]):
        total = op.Add(op.Mul(total, square), coefficient)
    return total


@_in_float64("aten.lgamma.default")
def lgamma(op: Emitter, x: ir.Value) -> ir.Value:
    """Stirling's series of x + 8, less the logarithms of x, x + 1, ... x + 7.

    Below 1/2 it is log(pi / |sin(pi x)|) less the value at 1 - x.
    """
    mirrored = op.Less(x, 0.5)
    z = op.Where(mirrored, op.Sub(1.0, x), x)
    shifted = op.Add(z, float(_SHIFT))
    inverse = op.Reciprocal(shifted)
    series = op.Mul(_series(op, op.Mul(inverse, inverse), _STIRLING), inverse)
    main = op.Sub(op.Mul(op.Sub(shifted, 0.5), op.Log(shifted)), shifted)
    total = op.Add(op.Add(main, 0.5 * math.log(2 * math.pi)), series)
    for k in range(_SHIFT):
        total = op.Sub(total, op.Log(op.Add(z, float(k))))
    angle = op.Where(mirrored, op.Sub(x, op.Floor(x)), 0.5)
    reflected = op.Sub(op.Sub(math.log(math.pi), op.Log(op.Sin(op.Mul(angle, math.pi)))), total)
    return op.Where(mirrored, reflected, total)


@_in_float64("aten.digamma.default", "aten.special_digamma.default")
def digamma(op: Emitter, x: ir.Value) -> ir.Value:
    """The asymptotic series of x + 8, less the reciprocals of x, x + 1, ... x + 7.

    Below 1/2 it is the value at 1 - x, less pi / tan(pi x).
    """
    mirrored = op.Less(x, 0.5)
    z = op.Where(mirrored, op.Sub(1.0, x), x)
    shifted = op.Add(z, float(_SHIFT))
    inverse = op.Reciprocal(shifted)
    square = op.Mul(inverse, inverse)
    total = op.Sub(op.Log(shifted), op.Mul(inverse, 0.5))
    total = op.Sub(total, op.Mul(_series(op, square, _DIGAMMA), square))
    for k in range(_SHIFT):
        total = op.Sub(total, op.Reciprocal(op.Add(z, float(k))))
    angle = op.Mul(op.Where(mirrored, op.Sub(x, op.Floor(x)), 0.5), math.pi)
    cotangent = op.Div(op.Cos(angle), op.Sin(angle))
    return op.Where(mirrored, op.Sub(total, op.Mul(cotangent, math.pi)), total)


@lower("aten.sinc.default")
def sinc(low: Lowering, x: ir.Value) -> ir.Value:
    """sin(pi x) / (pi x), with the gradient 0 at 0."""
    op = low.op
    x = low.tensor(x, low.dtype)
    zero = op.Equal(x, 0.0)
    angle = op.Mul(op.Where(zero, 1.0, x), math.pi)
    return op.Where(zero, 1.0, op.Div(op.Sin(angle), angle))


@lower("aten.xlogy")
def xlogy(low: Lowering, x: Any, y: Any) -> ir.Value:
    """X log(y); where x is 0 and log(y) not finite it is 0, with the gradient 0."""
    op = low.op
    x, y = low.tensors(x, y)
    return op.Mul(x, op.Log(_where_finite(low, op.Equal(x, 0.0), y, 0.0, 1.0)))


@lower("aten.special_xlog1py")
def xlog1py(low: Lowering, x: Any, y: Any) -> ir.Value:
    """X log(1 + y); where x is 0 and log(1 + y) not finite it is 0, with the gradient 0."""
    op = low.op
    x, y = low.tensors(x, y)
    return op.Mul(x, _formulas.log1p(op, _where_finite(low, op.Equal(x, 0.0), y, -1.0, 0.0)))


def _where_finite(low: Lowering, zero: ir.Value, y: ir.Value, bound: float, root: float) -> ir.Value:
    """Returns y, with the logarithm's root where `zero` and y is infinite or not above the bound."""
    op = low.op
    undefined = op.Or(op.LessOrEqual(y, bound), op.IsInf(y))
    return op.Where(op.And(zero, undefined), root, y)


@lower("aten.frexp.Tensor")
def frexp(low: Lowering, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The m of size 1/2 to 1 and the integer e with x = m 2^e; m = x and e = 0 for zeros, infinities and NaN."""
    op = low.op
    wide = low.tensor(x, ir.DataType.DOUBLE)
    size = low.stopped(op.Abs(wide))
    usual = op.And(op.Greater(size, 0.0), op.Less(size, math.inf))
    size = op.Where(usual, size, 0.5)
    exponent = op.Add(op.Floor(op.Div(op.Log(size), math.log(2))), 1.0)
    # The logarithm is rounded: beside a power of two it may be that of the other side.
    mantissa = _scaled(op, size, exponent)
    above, below = op.GreaterOrEqual(mantissa, 1.0), op.Less(mantissa, 0.5)
    step = op.Sub(op.Cast(above, to=ir.DataType.DOUBLE), op.Cast(below, to=ir.DataType.DOUBLE))
    exponent = op.Where(usual, op.Add(exponent, step), 0.0)
    return _scaled(op, wide, low.stopped(exponent)), op.Cast(exponent, to=ir.DataType.INT32)


def _scaled(op: Emitter, x: ir.Value, exponent: ir.Value) -> ir.Value:
    """The product x 2^-exponent, by two factors: one may be out of range."""
    half = op.Floor(op.Mul(exponent, 0.5))
    two = op.const(2.0, ir.DataType.DOUBLE)
    return op.Div(op.Div(x, op.Pow(two, half)), op.Pow(two, op.Sub(exponent, half)))
