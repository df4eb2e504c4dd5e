"""Differentiates elementwise arithmetic, analytic functions and casts; declares elementwise ops without a gradient."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import Cotangents, defvjp, nondifferentiable, vjp
from onnxtrain.emitter import Emitter
from onnxtrain.functions import clip_gradient, clip_gradient_of_finite

defvjp("Add", broadcasts=True, A=lambda op, n, ct: ct, B=lambda op, n, ct: ct)
defvjp("Sub", broadcasts=True, A=lambda op, n, ct: ct, B=lambda op, n, ct: op.Neg(ct))


def _is_square(n: NodeView) -> bool:
    """True if a Mul squares its input: one doubled cotangent then replaces the sum of two equal ones."""
    # Not in half precision, where x + y + y and x + 2 y round differently, and PyTorch computes the former.
    return n.A is n.B and n.A.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)


defvjp(
    "Mul",
    broadcasts=True,
    A=lambda op, n, ct: op.Mul(op.Mul(ct, 2.0) if _is_square(n) else ct, n.B),
    B=lambda op, n, ct: None if _is_square(n) else op.Mul(ct, n.A),
)
# B's cotangent is -ct A/B²; in terms of the output, -ct (C / B) needs one division.
defvjp(
    "Div",
    broadcasts=True,
    A=lambda op, n, ct: op.Div(ct, n.B),
    B=lambda op, n, ct: op.Neg(op.Mul(ct, op.Div(n.out.C, n.B))),
)
# fmod: C = A - k * B with the integer k = trunc(A / B). Rounding (A - C) / B finds k even where A / B rounds up to an
# integer (with Floor, because Round lacks bfloat16 at opset 21). With fmod=0, Mod supports integers only.
defvjp(
    "Mod",
    broadcasts=True,
    A=lambda op, n, ct: ct,
    B=lambda op, n, ct: op.Neg(op.Mul(ct, op.Floor(op.Add(op.Div(op.Sub(n.A, n.out.C), n.B), 0.5)))),
)
defvjp("Neg", X=lambda op, n, ct: op.Neg(ct))


def sign(op: Emitter, x: ir.Value, like: ir.Value) -> ir.Value:
    """Returns the sign of x, -1, 0 or 1, in the dtype of `like`.

    NaN has sign 0, as in PyTorch; ONNX Runtime's Sign would return NaN.
    """
    positive, negative = op.Greater(x, 0.0), op.Less(x, 0.0)
    return op.Sub(op.Cast(positive, to=like.dtype), op.Cast(negative, to=like.dtype))


# |x|'(0) = 0, as in PyTorch.
defvjp("Abs", X=lambda op, n, ct: op.Mul(ct, sign(op, n.X, ct)))
# Reciprocal, Exp, Tan and Sqrt read their outputs, to avoid recomputing the function.
defvjp("Sqrt", X=lambda op, n, ct: op.Div(op.Mul(ct, 0.5), n.out.Y))
defvjp("Reciprocal", X=lambda op, n, ct: op.Neg(op.Mul(ct, op.Mul(n.out.Y, n.out.Y))))
defvjp("Exp", input=lambda op, n, ct: op.Mul(ct, n.out.output))
defvjp("Log", input=lambda op, n, ct: op.Div(ct, n.input))
defvjp(
    "Erf",
    input=lambda op, n, ct: op.Mul(
        ct, op.Mul(op.Exp(op.Neg(op.Mul(n.input, n.input))), 2 / math.sqrt(math.pi))
    ),
)
defvjp("Sin", input=lambda op, n, ct: op.Mul(ct, op.Cos(n.input)))
defvjp("Cos", input=lambda op, n, ct: op.Neg(op.Mul(ct, op.Sin(n.input))))
defvjp("Tan", input=lambda op, n, ct: op.Mul(ct, op.Add(1.0, op.Mul(n.out.output, n.out.output))))
defvjp("Sinh", input=lambda op, n, ct: op.Mul(ct, op.Cosh(n.input)))
defvjp("Cosh", input=lambda op, n, ct: op.Mul(ct, op.Sinh(n.input)))


def _plus_square(op: Emitter, constant: float, x: ir.Value) -> ir.Value:
    return op.Add(constant, op.Mul(x, x))


def _minus_square(op: Emitter, x: ir.Value) -> ir.Value:
    """Returns 1 - x² as (1 - x)(1 + x), without cancellation near |x| = 1."""
    return op.Mul(op.Sub(1.0, x), op.Add(1.0, x))


def _square_minus(op: Emitter, x: ir.Value) -> ir.Value:
    """Returns x² - 1 as (|x| - 1)(|x| + 1), which is +0 at ±1, so that 1 / sqrt is plus infinity there."""
    magnitude = op.Abs(x)
    return op.Mul(op.Sub(magnitude, 1.0), op.Add(magnitude, 1.0))


defvjp("Asin", input=lambda op, n, ct: op.Div(ct, op.Sqrt(_minus_square(op, n.input))))
defvjp("Acos", input=lambda op, n, ct: op.Neg(op.Div(ct, op.Sqrt(_minus_square(op, n.input)))))
defvjp("Atan", input=lambda op, n, ct: op.Div(ct, _plus_square(op, 1.0, n.input)))
defvjp("Asinh", input=lambda op, n, ct: op.Div(ct, op.Sqrt(_plus_square(op, 1.0, n.input))))
defvjp("Acosh", input=lambda op, n, ct: op.Div(ct, op.Sqrt(_square_minus(op, n.input))))
defvjp("Atanh", input=lambda op, n, ct: op.Div(ct, _minus_square(op, n.input)))

# Where, because a multiplication with the mask would turn an infinite cotangent of the other branch into NaN.
defvjp(
    "Where",
    broadcasts=True,
    X=lambda op, n, ct: op.Where(n.condition, ct, 0.0),
    Y=lambda op, n, ct: op.Where(n.condition, 0.0, ct),
)


@vjp("Pow", wrt=("X", "Y"), broadcasts=True)
def pow_(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Z = X^Y:  ct_X = ct * Y * X^(Y-1),  ct_Y = ct * Z * log X.

    As in PyTorch, ct_X is 0 where Y = 0, and ct_Y is 0 where X = 0 <= Y, even where the formula is 0 * inf.
    """
    base = _power_base(op, n, ct) if n.needs("X") else None
    exponent = None
    if n.needs("Y"):
        flat = op.And(op.Equal(n.X, 0.0), op.GreaterOrEqual(n.Y, 0.0))
        exponent = op.Mul(ct, op.Where(flat, 0.0, op.Mul(n.out.Z, op.Log(n.X))))
        # The exponent's dtype may differ from the base's, which is the dtype of the output.
        if n.Y.dtype != ct.dtype:
            exponent = op.Cast(exponent, to=n.Y.dtype)
    return base, exponent


def _power_base(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value | None:
    """Returns the cotangent of the base of Pow: ct * Y * X^(Y-1), or 0 where Y = 0; None if Y is a constant 0."""
    exponents = n.constant(n.Y)
    if exponents is not None and exponents.size == 1:
        return _power_base_constant(op, n, ct, float(exponents.reshape(())))
    y = op.Cast(n.Y, to=ct.dtype) if n.Y.dtype != ct.dtype else n.Y
    slope = op.Mul(y, op.Pow(n.X, op.Sub(y, 1.0)))
    # At X = 0 and Y = 0, the formula would be 0 * inf.
    if exponents is None or not np.all(exponents):
        slope = op.Where(op.Equal(y, 0.0), 0.0, slope)
    return op.Mul(ct, slope)


def _power_base_constant(op: Emitter, n: NodeView, ct: ir.Value, exponent: float) -> ir.Value | None:
    """Returns the cotangent of the base for a constant exponent; None if it is zero."""
    # Common exponents avoid Pow, which is far slower than Mul.
    if exponent == 0:
        return None
    if exponent == 1:
        return ct
    if exponent == 2:
        return op.Mul(op.Mul(ct, 2.0), n.X)
    if exponent == 3:
        return op.Mul(op.Mul(ct, 3.0), op.Mul(n.X, n.X))
    if exponent == 0.5:
        return op.Div(op.Mul(ct, 0.5), n.out.Z)
    # As in PyTorch, the square root of minus infinity is NaN; as a power, and in float16, it is infinity.
    if exponent == 1.5 and n.X.dtype != ir.DataType.FLOAT16:
        return op.Mul(op.Mul(ct, 1.5), op.Sqrt(n.X))
    return op.Mul(op.Mul(ct, exponent), op.Pow(n.X, exponent - 1))


def _is_bound(n: NodeView, bound: ir.Value | None) -> bool:
    """True if a bound of a Clip is present and may be finite."""
    limit = n.constant(bound)
    return bound is not None and (limit is None or not np.isinf(limit.astype(np.float64)).any())


@vjp("Clip", wrt=("input", "min", "max"))
def clip(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Clip: y = min(max, max(min, x)).

    Elements of x within the bounds, inclusive, get their cotangent, as in torch.clamp. Each bound, a scalar, gets the
    sum of the cotangents of the elements that it replaced.
    """
    result: dict[str, ir.Value | None] = {}
    if n.needs("input"):
        result["input"] = _clipped(op, n, ct)
    for name, bound in (("min", n.min), ("max", n.max)):
        if not n.needs(name) or bound is None:
            continue
        if name == "max":
            # If min > max, every element is max.
            replaced = op.Greater(n.input, bound)
            replaced = op.Or(replaced, op.Greater(n.min, bound)) if n.min is not None else replaced
        else:
            replaced = op.Less(n.input, bound)
            replaced = op.And(replaced, op.Less(bound, n.max)) if n.max is not None else replaced
        result[name] = op.reshape_like(op.ReduceSum(op.Where(replaced, ct, 0.0), keepdims=0), bound)
    return result


def _clipped(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """Returns the cotangent of the input of a Clip; an absent bound is infinite."""
    low, high = _is_bound(n, n.min), _is_bound(n, n.max)
    if not low and not high:
        return ct
    mixed = n.is_mixed(n.outputs[0])
    if mixed or (low and high):
        bounds = (
            n.min if low else op.const(-np.inf, like=ct),
            n.max if high else op.const(np.inf, like=ct),
        )
        return op.call(clip_gradient_of_finite if mixed else clip_gradient, n.input, *bounds, ct)
    inside = op.GreaterOrEqual(n.input, n.min) if low else op.LessOrEqual(n.input, n.max)
    return op.Where(inside, ct, 0.0)


@vjp("Sum", wrt=("data_0",), broadcasts=True)
def sum_(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Sum: ct for every argument."""
    return [ct] * len(n.inputs)


@vjp("Mean", wrt=("data_0",), broadcasts=True)
def mean(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Mean: ct divided by the number of arguments, for every argument."""
    return [op.Div(ct, float(len(n.inputs)))] * len(n.inputs)


def _extremum(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Max and Min: arguments that attain the extremum share ct evenly, as in torch.maximum and torch.amax."""
    # A Max of one argument is the argument itself.
    if len(n.inputs) == 1:
        return [ct]
    if len(n.inputs) == 2:
        return _extremum_of_two(op, n, ct)
    reached = [op.Equal(x, n.outputs[0]) for x in n.inputs]
    share = op.Div(ct, op.Sum(*(op.Cast(hit, to=ct.dtype) for hit in reached)))
    return [
        op.Where(hit, share, 0.0) if n.needs(x) else None for x, hit in zip(n.inputs, reached, strict=True)
    ]


def _extremum_of_two(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Max and Min of two arguments: the selected argument gets ct; equal arguments get half of it each.

    Where an argument is NaN, both arguments get the whole ct, as in torch.maximum.
    """
    a, b = n.inputs
    share = op.Where(op.Equal(a, b), op.Mul(ct, 0.5), ct)
    beyond = op.Less if n.node.op_type == "Max" else op.Greater
    return [op.Where(beyond(x, other), 0.0, share) if n.needs(x) else None for x, other in ((a, b), (b, a))]


vjp("Max", wrt=("data_0",), broadcasts=True)(_extremum)
vjp("Min", wrt=("data_0",), broadcasts=True)(_extremum)


def cast_back(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """Returns the cotangent in the dtype of the node's input."""
    if n.input.dtype is None:
        return op.CastLike(ct, n.input)
    return ct if ct.dtype == n.input.dtype else op.Cast(ct, to=n.input.dtype)


defvjp("Identity", input=lambda op, n, ct: ct)
# Between floating-point types only: integers and Booleans have no cotangents.
defvjp("Cast", input=cast_back)
defvjp("CastLike", input=cast_back, target_type=lambda op, n, ct: None)

nondifferentiable(
    "Sign", "Floor", "Ceil", "Round", reason="piecewise constant: its derivative is zero almost everywhere"
)
nondifferentiable(
    *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsInf", "IsNaN"),
    *("And", "Or", "Xor", "Not"),
    reason="its output is Boolean",
)
nondifferentiable(
    *("BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"), reason="defined only for integers"
)
nondifferentiable("BitCast", reason="reinterprets bits: not a function of the real value")
