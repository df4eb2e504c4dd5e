"""Write functions that ONNX, or a kernel of ONNX Runtime, lacks by formulas of other ops.

Each takes an emitter and a floating-point value and returns a value of its dtype and shape. In float64 their relative
error is below 1e-14; in float32 they are exact to a few units in the last place.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain.emitter import Emitter


def log1p(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes log(1 + x) without cancellation at 0."""
    return op.Add(*log1p_terms(op, x))


def log1p_terms(op: Emitter, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Returns two terms whose sum is log(1 + x): log u and (x - (u - 1)) / u with u = 1 + x.

    The second term corrects the rounding of u. The derivative of the first term is that of the sum.
    """
    u = op.Add(x, 1.0)
    correction = op.Div(op.Sub(x, op.Sub(u, 1.0)), u)
    # For u = 0 or infinity it is NaN, and log u alone is right.
    return op.Log(u), op.Where(op.IsNaN(correction), 0.0, correction)


def expm1(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes exp(x) - 1 as tanh(x / 2) (exp(x) + 1), without cancellation at 0."""
    return op.Mul(op.Tanh(op.Mul(x, 0.5)), op.Add(op.Exp(x), 1.0))


def softplus(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes log(1 + exp(x)) as max(x, 0) + log1p(exp(-|x|)), without overflow."""
    return op.Add(op.Relu(x), log1p(op, op.Exp(op.Neg(op.Abs(x)))))


def sinh(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes sinh x as tanh(x / 2) (1 + cosh x), without cancellation at 0."""
    return op.Mul(op.Tanh(op.Mul(x, 0.5)), op.Add(cosh(op, x), 1.0))


def cosh(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes (exp(x) + exp(-x)) / 2."""
    # From exp(|x| / 2): exp(|x|) itself would overflow before its half does.
    half = op.Exp(op.Mul(op.Abs(x), 0.5))
    return op.Mul(half, op.Mul(op.Add(half, op.Div(op.Exp(op.Neg(op.Abs(x))), half)), 0.5))


def tan(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes sin(x) / cos(x)."""
    return op.Div(op.Sin(x), op.Cos(x))


def asinh(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes asinh x, with a = |x|, as sign(x) log1p(a + a² / (1 + sqrt(1 + a²)))."""
    # From 1e8 on log(a) + log(2) is as exact, while a² could overflow.
    size = op.Abs(x)
    small = op.Min(size, 1e8)
    square = op.Mul(small, small)
    near = log1p(op, op.Add(small, op.Div(square, op.Add(op.Sqrt(op.Add(square, 1.0)), 1.0))))
    far = op.Add(op.Log(op.Max(size, 1.0)), math.log(2))
    return op.Mul(op.Sign(x), op.Where(op.Less(size, 1e8), near, far))


def acosh(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes acosh x, with t = x - 1, as log1p(t + sqrt(t (t + 2))); from 1e8 on as log(x) + log(2)."""
    t = op.Sub(op.Min(x, 1e8), 1.0)
    near = log1p(op, op.Add(t, op.Sqrt(op.Mul(t, op.Add(t, 2.0)))))
    return op.Where(op.Less(x, 1e8), near, op.Add(op.Log(x), math.log(2)))


def atanh(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes atanh x, with a = |x|, as sign(x) log1p(2 a / (1 - a)) / 2."""
    size = op.Abs(x)
    half = op.Mul(log1p(op, op.Div(op.Mul(size, 2.0), op.Sub(1.0, size))), 0.5)
    return op.Mul(op.Sign(x), half)


def atan(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes atan x from a guess g with an error below 0.005.

    With t = |x|, or 1 / |x| above 1, the tangent of the error is (t cos g - sin g) / (cos g + t sin g). Its arc tangent
    is a power series that converges fast. Above 1 the result is pi / 2 - atan(t).
    """
    size = op.Abs(x)
    steep = op.Greater(size, 1.0)
    t = op.Where(steep, op.Reciprocal(op.Max(size, 1.0)), size)
    square = op.Mul(t, t)
    guess = op.Div(t, op.Add(op.Mul(square, 0.28), 1.0))
    sine, cosine = op.Sin(guess), op.Cos(guess)
    tangent = op.Div(op.Sub(op.Mul(t, cosine), sine), op.Add(cosine, op.Mul(t, sine)))
    second = op.Mul(tangent, tangent)
    series = op.Sub(1.0, op.Mul(second, op.Sub(1 / 3, op.Mul(second, op.Sub(1 / 5, op.Mul(second, 1 / 7))))))
    angle = op.Add(guess, op.Mul(tangent, series))
    return op.Mul(op.Sign(x), op.Where(steep, op.Sub(math.pi / 2, angle), angle))


def asin(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes asin x as 2 atan(x / (1 + sqrt((1 - x) (1 + x))))."""
    root = op.Sqrt(op.Mul(op.Sub(1.0, x), op.Add(x, 1.0)))
    return op.Mul(atan(op, op.Div(x, op.Add(root, 1.0))), 2.0)


def acos(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes acos x as 2 atan(sqrt((1 - x) / (1 + x)))."""
    return op.Mul(atan(op, op.Sqrt(op.Div(op.Sub(1.0, x), op.Add(x, 1.0)))), 2.0)


# Step and number of nodes of the trapezoidal rule. Its error is exp(-(pi / step)²), and the terms of further nodes are
# below 1e-18.
_STEP, _NODES = 0.5, 13


def erfcx(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes exp(x²) erfc(x) for x >= 1/2, by the trapezoidal rule for its integral over the real line.

    With step h, erfc(x) = h x / pi exp(-x²) sum over all k of exp(-k² h²) / (x² + k² h²) - 2 / (exp(2 pi x / h) - 1);
    the last term is the residue of the pole at i x (Matta and Reichel, Math. Comp. 25 (1971), 339-344).
    """
    places = (_STEP * np.arange(_NODES + 1)) ** 2
    weights = np.exp(-places) * np.where(places > 0, 2.0, 1.0) * _STEP / math.pi
    # x / (x² + p) = 1 / (x + p / x): the square of a large x would overflow.
    column = op.Unsqueeze(x, [-1])
    terms = op.Div(op.const(weights, like=x), op.Add(column, op.Div(op.const(places, like=x), column)))
    integral = op.ReduceSum(terms, [-1], keepdims=0)
    # From 6 on the pole counts for less than 1e-16 of the whole, and exp(x²) might overflow.
    near = op.Min(x, 6.0)
    pole = op.Div(
        op.Mul(op.Exp(op.Mul(near, near)), 2.0), op.Sub(op.Exp(op.Mul(near, 2 * math.pi / _STEP)), 1.0)
    )
    return op.Where(op.Less(x, 6.0), op.Sub(integral, pole), integral)


def erf(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes erf x for |x| < 1 by a series, 2 / sqrt(pi) x exp(-x²) sum of (2 x²)^n / (2 n + 1)!!, else by erfcx."""
    # From 7 on the result is 1 in float64.
    size = op.Abs(x)
    small, large = op.Min(size, 1.0), op.Min(op.Max(size, 1.0), 7.0)
    doubled = op.Mul(op.Mul(small, small), 2.0)
    total = op.const(0.0, like=x)
    for n in reversed(range(20)):
        total = op.Add(op.Mul(op.Div(doubled, 2.0 * n + 3), total), 1.0)
    exponential = op.Exp(op.Neg(op.Mul(small, small)))
    near = op.Mul(op.Mul(op.Mul(small, exponential), total), 2 / math.sqrt(math.pi))
    far = op.Sub(1.0, op.Mul(op.Exp(op.Neg(op.Mul(large, large))), erfcx(op, large)))
    value = op.Mul(op.Sign(x), op.Where(op.Less(size, 1.0), near, far))
    # Less is false for NaN, and Min and Max need not pass it on.
    return op.Where(op.IsNaN(x), x, value)
