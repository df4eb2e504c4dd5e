"""Emits elementary functions, e.g. `log1p`, that ONNX lacks or that ONNX Runtime has no float64 kernel for.

Each function takes an emitter and a floating-point value, and returns a value of the same dtype and shape. The relative
error is below 1e-14 in float64, and a few units in the last place in float32.
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

    The second term corrects the rounding of u. Only the first term contributes to the derivative.
    """
    u = op.Add(x, 1.0)
    correction = op.Div(op.Sub(x, op.Sub(u, 1.0)), u)
    # If u is 0 or infinite, the correction is NaN, and log u is exact.
    return op.Log(u), op.Where(op.IsNaN(correction), 0.0, correction)


def expm1(op: Emitter, x: ir.Value, exponential: ir.Value | None = None) -> ir.Value:
    """Computes exp(x) - 1 as tanh(x / 2) (exp(x) + 1), without cancellation at 0.

    Pass exp(x) as `exponential` if it has already been computed.
    """
    exponential = op.Exp(x) if exponential is None else exponential
    return op.Mul(op.Tanh(op.Mul(x, 0.5)), op.Add(exponential, 1.0))


def sigmoid(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes 1 / (1 + exp(-x)).

    ONNX Runtime's Sigmoid kernel has an absolute error of 1e-17, so its result is 0 for x = -40.
    """
    return op.Reciprocal(op.Add(op.Exp(op.Neg(x)), 1.0))


def softplus(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes log(1 + exp(x)) as max(x, 0) + log1p(exp(-|x|)), without overflow."""
    return op.Add(op.Relu(x), log1p(op, op.Exp(op.Neg(op.Abs(x)))))


def sinh(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes sinh x as tanh(x / 2) (1 + cosh x), without cancellation at 0."""
    return op.Mul(op.Tanh(op.Mul(x, 0.5)), op.Add(cosh(op, x), 1.0))


def cosh(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes (exp(x) + exp(-x)) / 2."""
    # Uses exp(|x| / 2)², because exp(|x|) overflows for smaller x than cosh x does.
    half = op.Exp(op.Mul(op.Abs(x), 0.5))
    return op.Mul(half, op.Mul(op.Add(half, op.Div(op.Exp(op.Neg(op.Abs(x))), half)), 0.5))


def tan(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes sin(x) / cos(x)."""
    return op.Div(op.Sin(x), op.Cos(x))


def asinh(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes asinh x as sign(x) log1p(a + a² / (1 + sqrt(1 + a²))) with a = |x|."""
    # For a >= 1e8, uses log(a) + log(2), which is as exact: a² could overflow.
    magnitude = op.Abs(x)
    capped = op.Min(magnitude, 1e8)
    square = op.Mul(capped, capped)
    near = log1p(op, op.Add(capped, op.Div(square, op.Add(op.Sqrt(op.Add(square, 1.0)), 1.0))))
    far = op.Add(op.Log(op.Max(magnitude, 1.0)), math.log(2))
    return op.Mul(op.Sign(x), op.Where(op.Less(magnitude, 1e8), near, far))


def acosh(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes acosh x as log1p(t + sqrt(t (t + 2))) with t = x - 1, and as log(x) + log(2) for x >= 1e8."""
    t = op.Sub(op.Min(x, 1e8), 1.0)
    # For x < -1, t (t + 2) is positive.
    outside = op.Less(x, 1.0)
    root = op.Sqrt(op.Where(outside, op.const(math.nan, like=x), op.Mul(t, op.Add(t, 2.0))))
    near = log1p(op, op.Add(t, root))
    return op.Where(op.Less(x, 1e8), near, op.Add(op.Log(x), math.log(2)))


def atanh(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes atanh x as sign(x) log1p(2 a / (1 - a)) / 2 with a = |x|."""
    magnitude = op.Abs(x)
    half = op.Mul(log1p(op, op.Div(op.Mul(magnitude, 2.0), op.Sub(1.0, magnitude))), 0.5)
    return op.Mul(op.Sign(x), half)


def atan(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes atan x by correcting an approximation g, whose error is below 0.005.

    Let t = |x| if |x| <= 1, else 1 / |x|. The tangent of the error is (t cos g - sin g) / (cos g + t sin g), and its
    arctangent is a power series that converges fast. For |x| > 1 the result is sign(x) (pi / 2 - atan(t)).
    """
    magnitude = op.Abs(x)
    steep = op.Greater(magnitude, 1.0)
    t = op.Where(steep, op.Reciprocal(op.Max(magnitude, 1.0)), magnitude)
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


_STEP, _NODES = 0.5, 13
"""Step and number of nodes of the trapezoidal rule. Its error is exp(-(pi / step)²); omitted terms are below 1e-18."""


def erfcx(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes exp(x²) erfc(x) for x >= 1/2, by applying the trapezoidal rule to an integral over the real line.

    With step h, erfc(x) = h x / pi exp(-x²) sum over all k of exp(-k² h²) / (x² + k² h²) - 2 / (exp(2 pi x / h) - 1).
    The last term is the residue of the pole at i x (Matta and Reichel, Math. Comp. 25 (1971), 339-344).
    """
    squared_nodes = (_STEP * np.arange(_NODES + 1)) ** 2
    weights = np.exp(-squared_nodes) * np.where(squared_nodes > 0, 2.0, 1.0) * _STEP / math.pi
    # Uses x / (x² + p) = 1 / (x + p / x), because x² could overflow.
    column = op.Unsqueeze(x, [-1])
    terms = op.Div(op.const(weights, like=x), op.Add(column, op.Div(op.const(squared_nodes, like=x), column)))
    integral = op.ReduceSum(terms, [-1], keepdims=0)
    # For x >= 6, the residue is less than 1e-16 of the result, and exp(x²) could overflow.
    capped = op.Min(x, 6.0)
    residue = op.Div(
        op.Mul(op.Exp(op.Mul(capped, capped)), 2.0), op.Sub(op.Exp(op.Mul(capped, 2 * math.pi / _STEP)), 1.0)
    )
    return op.Where(op.Less(x, 6.0), op.Sub(integral, residue), integral)


def erf(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes erf x, for |x| < 1 as 2 / sqrt(pi) x exp(-x²) times the sum of (2 x²)^n / (2 n + 1)!! over n >= 0.

    For larger |x|, uses erf x = sign(x) (1 - exp(-x²) erfcx(|x|)).
    """
    # For |x| >= 7, the result is ±1 in float64.
    magnitude = op.Abs(x)
    small, large = op.Min(magnitude, 1.0), op.Min(op.Max(magnitude, 1.0), 7.0)
    twice_square = op.Mul(op.Mul(small, small), 2.0)
    total = op.const(0.0, like=x)
    for n in reversed(range(20)):
        total = op.Add(op.Mul(op.Div(twice_square, 2.0 * n + 3), total), 1.0)
    exponential = op.Exp(op.Neg(op.Mul(small, small)))
    near = op.Mul(op.Mul(op.Mul(small, exponential), total), 2 / math.sqrt(math.pi))
    far = op.Sub(1.0, op.Mul(op.Exp(op.Neg(op.Mul(large, large))), erfcx(op, large)))
    value = op.Mul(op.Sign(x), op.Where(op.Less(magnitude, 1.0), near, far))
    # Less is false for NaN, and Min and Max may drop it.
    return op.Where(op.IsNaN(x), x, value)
