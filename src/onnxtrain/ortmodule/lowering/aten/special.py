"""Lowers special functions: erf and gamma functions, which are computed in float64 for all dtypes, xlogy and frexp."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.ortmodule.lowering import _formulas
from onnxtrain.ortmodule.lowering._table import Lowering, lower

Formula = Callable[[Emitter, ir.Value], ir.Value]


def _in_float64(
    *names: str, slope: Callable[[Emitter, ir.Value, ir.Value], ir.Value] | None = None
) -> Callable[[Formula], Formula]:
    """Returns a decorator that registers a float64 formula as the lowering of ATen ops.

    The argument, of any dtype, is cast to float64, and the final value to the dtype that the op returns.

    Args:
        names: overloads of the ops, e.g. "aten.erfc.default".
        slope: emits the derivative, given the emitter, the argument x and the result y. Default: the derivative of the
            formula.
    """

    def register(formula: Formula) -> Formula:
        @lower(*names)
        def lowered(low: Lowering, x: ir.Value) -> ir.Value:
            op, x = low.op, low.tensor(x, ir.DataType.DOUBLE)
            y = formula(op, x)
            return y if slope is None else low.with_slope(y, x, slope(op, x, y))

        return formula

    return register


def _erfc_slope(op: Emitter, x: ir.Value, _: ir.Value) -> ir.Value:
    return op.Mul(op.Exp(op.Neg(op.Mul(x, x))), -2 / math.sqrt(math.pi))


def _erfcx_slope(op: Emitter, x: ir.Value, y: ir.Value) -> ir.Value:
    return op.Sub(op.Mul(op.Mul(x, 2.0), y), 2 / math.sqrt(math.pi))


def _log_ndtr_slope(op: Emitter, x: ir.Value, _: ir.Value) -> ir.Value:
    return op.Div(math.sqrt(2 / math.pi), erfcx(op, op.Mul(x, -math.sqrt(0.5))))


@_in_float64("aten.erfc.default", "aten.special_erfc.default", slope=_erfc_slope)
def erfc(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes 1 - erf(x) for x < 1, else exp(-x²) erfcx(x)."""
    low = op.Less(x, 1.0)
    # In each branch, arguments of the other branch are replaced by a constant, because an overflow would make the
    # gradient NaN.
    far = op.Where(low, 1.0, x)
    tail = op.Mul(op.Exp(op.Neg(op.Mul(far, far))), _formulas.erfcx(op, far))
    return op.Where(low, op.Sub(1.0, op.Erf(x)), tail)


@_in_float64("aten.special_erfcx.default", slope=_erfcx_slope)
def erfcx(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes exp(x²) erfc(x)."""
    low = op.Less(x, 1.0)
    near, far = op.Where(low, x, 0.0), op.Where(low, 1.0, x)
    scaled = op.Mul(op.Exp(op.Mul(near, near)), op.Sub(1.0, op.Erf(near)))
    return op.Where(low, scaled, _formulas.erfcx(op, far))


@_in_float64("aten.special_log_ndtr.default", slope=_log_ndtr_slope)
def log_ndtr(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes log(erfcx(-x / sqrt(2)) / 2) - x² / 2 for x < -1, else log1p(-erfc(x / sqrt(2)) / 2)."""
    low = op.Less(x, -1.0)
    below, above = op.Where(low, x, -1.0), op.Where(low, 0.0, x)
    tail = op.Log(op.Mul(erfcx(op, op.Mul(below, -math.sqrt(0.5))), 0.5))
    tail = op.Sub(tail, op.Mul(op.Mul(below, below), 0.5))
    central = _formulas.log1p(op, op.Mul(erfc(op, op.Mul(above, math.sqrt(0.5))), -0.5))
    return op.Where(low, tail, central)


@_in_float64("aten.erfinv.default", "aten.special_erfinv.default")
def erfinv(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes the inverse of erf for |x|, then restores the sign of x."""
    # Not by Abs and Sign, whose gradients at 0 are 0.
    negative = op.Less(x, 0.0)
    magnitude = op.Where(negative, op.Neg(x), x)
    y = _positive_erfinv(op, magnitude, op.Sub(1.0, magnitude))
    return op.Where(negative, op.Neg(y), y)


@_in_float64("aten.special_ndtri.default")
def ndtri(op: Emitter, p: ir.Value) -> ir.Value:
    """Computes the quantile of the normal distribution, sqrt(2) erfinv(2 p - 1)."""
    upper = op.Greater(p, 0.5)
    # Uses the smaller tail, because 2 p - 1 loses the digits of a small p.
    tail = op.Mul(op.Where(upper, op.Sub(1.0, p), p), 2.0)
    magnitude = op.Mul(_positive_erfinv(op, op.Sub(1.0, tail), tail), math.sqrt(2))
    return op.Where(upper, magnitude, op.Neg(magnitude))


def _positive_erfinv(op: Emitter, x: ir.Value, complement: ir.Value) -> ir.Value:
    """Computes erfinv(x) for x >= 0, with three steps of Halley's method.

    The initial guess is the power series for x < 1/2, else Winitzki's approximation. Both have errors below 2e-3. For
    x >= 1/2, the method solves erfc(y) = 1 - x, which keeps the digits of a small 1 - x.

    Args:
        op: the emitter.
        x: the argument, float64.
        complement: 1 - x, float64. It may be more accurate than the rounded difference of 1 and `x`.
    """
    small = op.Less(x, 0.5)
    near, far = op.Where(small, x, 0.0), op.Where(small, 0.5, complement)
    inside = op.And(op.Greater(far, 0.0), op.LessOrEqual(far, 1.0))
    far = op.Where(inside, far, 0.5)
    square = op.Mul(near, near)
    series = op.Add(op.Mul(square, op.Add(op.Mul(square, 7 * math.pi**2 / 480), math.pi / 12)), 1.0)
    start = op.Mul(op.Mul(near, series), math.sqrt(math.pi) / 2)
    log = op.Log(op.Mul(far, op.Sub(2.0, far)))
    half = op.Add(op.Mul(log, 0.5), 2 / (math.pi * 0.147))
    winitzki = op.Sqrt(op.Sub(op.Sqrt(op.Sub(op.Mul(half, half), op.Div(log, 0.147))), half))
    y = op.Where(small, start, winitzki)
    for _ in range(3):
        error = op.Where(small, op.Sub(op.Erf(y), near), op.Sub(far, erfc(op, y)))
        step = op.Mul(op.Mul(error, op.Exp(op.Mul(y, y))), math.sqrt(math.pi) / 2)
        y = op.Sub(y, op.Div(step, op.Add(op.Mul(y, step), 1.0)))
    outside = op.Where(op.Equal(complement, 0.0), math.inf, op.const(math.nan, like=x))
    # This makes the gradient infinite at 1, and NaN beyond.
    in_domain = op.Or(small, inside)
    return op.Mul(op.Where(in_domain, 1.0, outside), op.Where(in_domain, y, x))


_SHIFT = 8
"""Number of recurrence steps that shift the argument of lgamma and digamma to the asymptotic range."""

_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
"""Coefficients B(2n) / (2n (2n - 1)), n = 1, 2, ..., with the Bernoulli numbers B, for lgamma."""

_DIGAMMA = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)
"""Coefficients B(2n) / (2n), n = 1, 2, ..., for digamma."""

_TRIGAMMA = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)
"""Bernoulli numbers B(2n), n = 1, 2, ..., for the derivative of digamma."""


def _polynomial(op: Emitter, square: ir.Value, coefficients: tuple[float, ...]) -> ir.Value:
    """Evaluates a polynomial in `square` with Horner's rule. The first of the `coefficients` is the constant term."""
    total = op.const(coefficients[-1], like=square)
    for coefficient in reversed(coefficients[:-1]):
        total = op.Add(op.Mul(total, square), coefficient)
    return total


def _lgamma_slope(op: Emitter, x: ir.Value, _: ir.Value) -> ir.Value:
    return digamma(op, x)


def _trigamma(op: Emitter, x: ir.Value, _: ir.Value) -> ir.Value:
    """Computes ψ'(x) by the asymptotic series at x + 8, plus 1 / x², 1 / (x + 1)², ..., 1 / (x + 7)².

    For x < 1/2, uses the reflection ψ'(x) = (pi / sin(pi x))² - ψ'(1 - x).
    """
    mirrored = op.Less(x, 0.5)
    z = op.Where(mirrored, op.Sub(1.0, x), x)
    inverse = op.Reciprocal(op.Add(z, float(_SHIFT)))
    square = op.Mul(inverse, inverse)
    # The derivative of the series of ψ, with coefficients B(2n).
    series = op.Mul(_polynomial(op, square, _TRIGAMMA), op.Mul(square, inverse))
    total = op.Add(op.Add(inverse, op.Mul(square, 0.5)), series)
    for k in range(_SHIFT):
        step = op.Reciprocal(op.Add(z, float(k)))
        total = op.Add(total, op.Mul(step, step))
    ratio = op.Div(math.pi, op.Sin(op.Mul(op.Where(mirrored, x, 0.5), math.pi)))
    return op.Where(mirrored, op.Sub(op.Mul(ratio, ratio), total), total)


@_in_float64("aten.lgamma.default", slope=_lgamma_slope)
def lgamma(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes log |Γ(x)| by Stirling's series at x + 8, minus the logarithms of x, x + 1, ..., x + 7.

    For x < 1/2, uses the reflection log |Γ(x)| = log(pi / |sin(pi x)|) - log |Γ(1 - x)|.
    """
    mirrored = op.Less(x, 0.5)
    z = op.Where(mirrored, op.Sub(1.0, x), x)
    shifted = op.Add(z, float(_SHIFT))
    inverse = op.Reciprocal(shifted)
    series = op.Mul(_polynomial(op, op.Mul(inverse, inverse), _STIRLING), inverse)
    main = op.Sub(op.Mul(op.Sub(shifted, 0.5), op.Log(shifted)), shifted)
    total = op.Add(op.Add(main, 0.5 * math.log(2 * math.pi)), series)
    for k in range(_SHIFT):
        total = op.Sub(total, op.Log(op.Add(z, float(k))))
    # |sin(pi x)| has the period 1, so the fractional part of x suffices, for which the sine is exact.
    angle = op.Where(mirrored, _fraction(op, x), 0.5)
    sine = op.Abs(op.Sin(op.Mul(angle, math.pi)))
    reflected = op.Sub(op.Sub(math.log(math.pi), op.Log(sine)), total)
    y = op.Where(mirrored, reflected, total)
    # At the poles, and at infinities, terms of the formula are infinities of either sign.
    return op.Where(op.Or(op.IsInf(x), op.Equal(sine, 0.0)), math.inf, y)


def _fraction(op: Emitter, x: ir.Value) -> ir.Value:
    """Returns x - trunc(x), which has the sign of x. Unlike x - floor(x), it is exact for a small negative x."""
    return op.Mod(x, op.const(1.0, like=x), fmod=1)


@_in_float64("aten.digamma.default", "aten.special_digamma.default", slope=_trigamma)
def digamma(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes ψ(x) by the asymptotic series at x + 8, minus the reciprocals of x, x + 1, ..., x + 7.

    For x < 1/2, uses the reflection ψ(x) = ψ(1 - x) - pi / tan(pi x).
    """
    mirrored = op.Less(x, 0.5)
    z = op.Where(mirrored, op.Sub(1.0, x), x)
    shifted = op.Add(z, float(_SHIFT))
    inverse = op.Reciprocal(shifted)
    square = op.Mul(inverse, inverse)
    total = op.Sub(op.Log(shifted), op.Mul(inverse, 0.5))
    total = op.Sub(total, op.Mul(_polynomial(op, square, _DIGAMMA), square))
    for k in range(_SHIFT):
        total = op.Sub(total, op.Reciprocal(op.Add(z, float(k))))
    fraction = _fraction(op, x)
    angle = op.Mul(op.Where(mirrored, fraction, 0.5), math.pi)
    # ONNX Runtime's sine of -0 is +0.
    small = op.Less(op.Abs(angle), 1e-9)
    cotangent = op.Where(small, op.Reciprocal(angle), op.Div(op.Cos(angle), op.Sin(angle)))
    # As in PyTorch, NaN at the poles, but infinite at ±0.
    pole = op.And(op.Equal(fraction, 0.0), op.Less(x, 0.0))
    cotangent = op.Where(pole, op.const(math.nan, like=x), cotangent)
    return op.Where(mirrored, op.Sub(total, op.Mul(cotangent, math.pi)), total)


@lower("aten.sinc.default")
def sinc(low: Lowering, x: ir.Value) -> ir.Value:
    op = low.op
    (x,) = low.wide(x)
    is_zero = op.Equal(x, 0.0)
    angle = op.Mul(x, math.pi)
    sine = op.Sin(angle)
    y = op.Where(is_zero, 1.0, op.Div(sine, angle))
    # PyTorch's formula: 0 where pi x² is 0.
    square = op.Mul(op.Mul(x, x), math.pi)
    slope = op.Div(op.Sub(op.Mul(angle, op.Cos(angle)), sine), square)
    return low.with_slope(y, x, op.Where(op.Equal(square, 0.0), 0.0, slope))


@lower("aten.logit.default")
def logit(low: Lowering, x: ir.Value, eps: float | None = None) -> ir.Value:
    op = low.op
    (x,) = low.wide(x)
    z = x if eps is None else op.Clip(x, *low.wide(eps, 1 - eps))
    y = op.Log(op.Div(z, op.Sub(1.0, z)))
    # As in PyTorch: outside of [eps, 1 - eps] the gradient is 0, and without eps NaN.
    lowest, highest = low.wide(0.0, 1.0)
    if eps is not None:
        # PyTorch rounds these bounds, but not those of the result.
        lowest, highest = low.wide(*low.tensors(eps, 1 - eps))
    outside = op.Or(op.Less(x, lowest), op.Greater(x, highest))
    slope = op.Reciprocal(op.Mul(x, op.Sub(1.0, x)))
    return low.with_slope(y, x, op.Where(outside, math.nan if eps is None else 0.0, slope))


@lower("aten.special_entr.default")
def entr(low: Lowering, x: ir.Value) -> ir.Value:
    """Lowers -x log(x), which is 0 at 0 and minus infinity for x < 0."""
    op = low.op
    (x,) = low.wide(x)
    log = op.Log(x)
    y = op.Where(op.Equal(x, 0.0), 0.0, op.Neg(op.Mul(x, log)))
    y = op.Where(op.Less(x, 0.0), -math.inf, y)
    return low.with_slope(y, x, op.Sub(-1.0, log))


@lower("aten.xlogy")
def xlogy(low: Lowering, x: Any, y: Any) -> ir.Value:
    """Lowers x log(y), which is 0 where x is 0. The gradient w.r.t. y is x / y, as in PyTorch: NaN at (0, 0)."""
    op = low.op
    x, y = low.wide(*low.tensors(x, y))
    log, is_zero = op.Log(y), op.Equal(x, 0.0)
    result = op.Mul(x, _log_or_zero(low, is_zero, y, log))
    slope = op.Where(op.And(is_zero, op.LessOrEqual(y, 0.0)), 0.0, log)
    return low.with_slopes(result, x, slope, y, op.Div(x, y))


@lower("aten.special_xlog1py")
def xlog1py(low: Lowering, x: Any, y: Any) -> ir.Value:
    """Lowers x log(1 + y), which is 0 where x is 0. The gradient w.r.t. y is x / (1 + y) everywhere, as in PyTorch."""
    op = low.op
    x, y = low.wide(*low.tensors(x, y))
    log, is_zero, argument = _formulas.log1p(op, y), op.Equal(x, 0.0), op.Add(y, 1.0)
    result = op.Mul(x, _log_or_zero(low, is_zero, argument, log))
    slope = op.Where(op.And(is_zero, op.LessOrEqual(argument, 0.0)), 0.0, log)
    return low.with_slopes(result, x, slope, y, op.Div(x, argument))


def _log_or_zero(low: Lowering, zero: ir.Value, argument: ir.Value, log: ir.Value) -> ir.Value:
    """Returns `log`, with 0 where `zero` is true and the logarithm is infinite or undefined.

    Args:
        low: the lowering.
        zero: true where the factor of the logarithm is 0.
        argument: the argument of the logarithm. The logarithm of NaN remains NaN.
        log: the logarithm of `argument`.
    """
    op = low.op
    undefined = op.Or(op.LessOrEqual(argument, 0.0), op.IsInf(argument))
    return op.Where(op.And(zero, undefined), 0.0, log)


@lower("aten.frexp.Tensor")
def frexp(low: Lowering, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Returns (m, e) with x = m 2^e and 1/2 <= |m| < 1, e as int32. For 0, infinity and NaN: m = x, e = 0."""
    op = low.op
    wide = low.tensor(x, ir.DataType.DOUBLE)
    magnitude = low.op.stop_gradient(op.Abs(wide))
    is_regular = op.And(op.Greater(magnitude, 0.0), op.Less(magnitude, math.inf))
    magnitude = op.Where(is_regular, magnitude, 0.5)
    exponent = op.Add(op.Floor(op.Div(op.Log(magnitude), math.log(2))), 1.0)
    # Near powers of two, the exponent may be off by one, because the logarithm is rounded.
    mantissa = _scaled(op, magnitude, exponent)
    above, below = op.GreaterOrEqual(mantissa, 1.0), op.Less(mantissa, 0.5)
    step = op.Sub(op.Cast(above, to=ir.DataType.DOUBLE), op.Cast(below, to=ir.DataType.DOUBLE))
    exponent = op.Where(is_regular, op.Add(exponent, step), 0.0)
    return _scaled(op, wide, low.op.stop_gradient(exponent)), op.Cast(exponent, to=ir.DataType.INT32)


def _scaled(op: Emitter, x: ir.Value, exponent: ir.Value) -> ir.Value:
    """Returns x 2^-exponent."""
    # Divides by two factors, because 2^exponent may be out of range.
    half = op.Floor(op.Mul(exponent, 0.5))
    two = op.const(2.0, ir.DataType.DOUBLE)
    return op.Div(op.Div(x, op.Pow(two, half)), op.Pow(two, op.Sub(exponent, half)))
