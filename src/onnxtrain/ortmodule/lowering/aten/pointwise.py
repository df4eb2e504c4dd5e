"""Elementwise arithmetic and analytic functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.ortmodule._torch import bounds_pass_gradients
from onnxtrain.ortmodule.lowering import _formulas
from onnxtrain.ortmodule.lowering._table import Lowering, lower
from onnxtrain.passes import mark_stop_gradient

BOOL = ir.DataType.BOOL


def stop_gradient(low: Lowering, x: ir.Value) -> ir.Value:
    """Returns `x` behind an Identity with the mark that stops gradients (`onnxtrain.passes.is_stop_gradient`)."""
    result: ir.Value = low.op.Identity(x)
    node = result.producer()
    assert node is not None
    mark_stop_gradient(node)
    return result


def _is_float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


def _operands(low: Lowering, *values: Any) -> tuple[ir.Value, ...]:
    """The operands in the dtype of the result; booleans as integers, which ONNX can add and multiply."""
    dtype = ir.DataType.INT32 if low.dtype == BOOL else low.dtype
    return tuple(low.tensor(value, dtype) for value in values)


def _factors(low: Lowering, a: Any, b: Any) -> tuple[ir.Value, ...]:
    """The operands; beside a narrow tensor a number is not rounded, the product is, as in PyTorch."""
    if low.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) and float in (type(a), type(b)):
        return low.tensor(a, ir.DataType.FLOAT), low.tensor(b, ir.DataType.FLOAT)
    return _operands(low, a, b)


def _scaled_operands(low: Lowering, a: Any, b: Any, alpha: Any) -> tuple[ir.Value, ir.Value]:
    """The operands a and alpha * b."""
    a, b = _operands(low, a, b)
    if isinstance(alpha, ir.Value) or alpha != 1:
        b = low.op.Mul(b, low.tensor(alpha, b.dtype))
    return a, b


@lower("aten.add.Tensor", "aten.add.Scalar")
def add(low: Lowering, a: Any, b: Any, alpha: Any = 1) -> ir.Value:
    return low.op.Add(*_scaled_operands(low, a, b, alpha))


@lower("aten.sub.Tensor", "aten.sub.Scalar")
def sub(low: Lowering, a: Any, b: Any, alpha: Any = 1) -> ir.Value:
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
    quotient = low.op.Div(a, b)  # integers: already rounded towards zero
    return truncated(low, quotient) if _is_float(quotient) else quotient


@lower("aten.floor_divide.default", "aten.floor_divide.Scalar")
def floor_divide(low: Lowering, a: Any, b: Any) -> ir.Value:
    """As PyTorch: from the exact remainder, because a / b may round up to the next integer."""
    op = low.op
    a, b = low.tensors(a, b)
    if not _is_float(a):
        return op.Div(op.Sub(a, op.Mod(a, b)), b)
    rest, corrected = _signed_rest(low, a, b)
    quotient = op.Div(op.Sub(a, rest), b)
    floor = op.Round(op.Sub(quotient, op.Cast(corrected, to=a.dtype)))
    if b.const_value is not None and np.all(b.const_value.numpy()):
        return floor
    return op.Where(op.Equal(b, 0.0), op.Div(low.stopped(a), low.stopped(b)), floor)


def _signed_rest(low: Lowering, a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The remainder with the sign of `a`, and whether one `b` is missing for that with the sign of `b`."""
    op = low.op
    rest = op.Mod(a, b, fmod=1)
    signs_differ = op.Xor(op.Less(rest, 0.0), op.Less(b, 0.0))
    return rest, op.And(op.Not(op.Equal(rest, 0.0)), signs_differ)


@lower("aten.remainder.Tensor", "aten.remainder.Scalar", "aten.remainder.Scalar_Tensor")
def remainder(low: Lowering, a: Any, b: Any) -> ir.Value:
    a, b = low.tensors(a, b)
    if not _is_float(a):
        return low.op.Mod(a, b)
    rest, short = _signed_rest(low, a, b)
    return low.op.Add(rest, low.op.Where(short, b, 0.0))


@lower("aten.fmod.Tensor", "aten.fmod.Scalar")
def fmod(low: Lowering, a: Any, b: Any) -> ir.Value:
    return low.op.Mod(*low.tensors(a, b), fmod=1)


@lower("aten.pow.Tensor_Scalar")
def pow_scalar(low: Lowering, x: ir.Value, exponent: Any) -> ir.Value:
    """A float base by Pow, which knows squares and cubes; an integer one by products, exact modulo 2^bits."""
    (x,) = _operands(low, x)
    if _is_float(x):
        if exponent == 0.5:
            return low.op.Sqrt(x)
        return low.op.Pow(x, low.tensor(exponent, low.dtype))
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
    if not _is_float(x):
        raise low.unsupported("ONNX Runtime rounds powers of integers to float64")
    return low.op.Pow(x, exponent)


@lower("aten.exp2.default")
def exp2(low: Lowering, x: ir.Value) -> ir.Value:
    return low.op.Pow(*low.tensors(2.0, x))


@lower("aten.ldexp.Tensor")
def ldexp(low: Lowering, x: ir.Value, exponent: ir.Value) -> ir.Value:
    x, exponent = low.tensors(x, exponent)
    return low.op.Mul(x, low.op.Pow(low.tensor(2.0, low.dtype), exponent))


_UNARY = {
    "sqrt": "Sqrt",
    "reciprocal": "Reciprocal",
    "exp": "Exp",
    "log": "Log",
    "sin": "Sin",
    "cos": "Cos",
    "tan": "Tan",
    "asin": "Asin",
    "acos": "Acos",
    "atan": "Atan",
    "sinh": "Sinh",
    "cosh": "Cosh",
    "tanh": "Tanh",
    "asinh": "Asinh",
    "acosh": "Acosh",
    "atanh": "Atanh",
    "erf": "Erf",
    "sigmoid": "Sigmoid",
}


def _unary(op_type: str) -> Callable[[Lowering, ir.Value], ir.Value]:
    """The lowering of a function that PyTorch computes in floating point whatever its argument is."""
    return lambda low, x: low.op.emit(op_type, low.tensor(x, low.dtype))


for _aten, _onnx in _UNARY.items():
    lower(f"aten.{_aten}.default")(_unary(_onnx))


@lower("aten.abs.default", "aten.sign.default", "aten.sgn.default")
def magnitude_or_sign(low: Lowering, x: ir.Value) -> ir.Value:
    if low.dtype == BOOL:
        return x
    if "abs" in str(low.node.target):
        return low.op.Abs(x)
    sign = low.op.Sign(x)
    return low.op.Where(low.op.IsNaN(x), 0.0, sign) if _is_float(x) else sign


@lower("aten.signbit.default")
def signbit(low: Lowering, x: ir.Value) -> ir.Value:
    """The sign of a zero shows in its reciprocal."""
    op = low.op
    if not _is_float(x):
        return op.Less(low.tensor(x, ir.DataType.INT64), op.const(0))
    return op.Less(op.Where(op.Equal(x, 0.0), op.Reciprocal(x), x), 0.0)


@lower("aten.copysign.Tensor", "aten.copysign.Scalar")
def copysign(low: Lowering, x: ir.Value, y: Any) -> ir.Value:
    """The gradient of `y` is zero, and not None: it comes through a Sign whose value is multiplied by zero."""
    op = low.op
    x, y = low.tensors(x, y)
    nothing = op.Mul(op.Where(op.IsNaN(y), 0.0, op.Sign(y)), 0.0)
    return op.Mul(
        op.Abs(x), op.Add(op.Where(signbit(low, y), op.const(-1.0, like=x), op.const(1.0, like=x)), nothing)
    )


@lower("aten.neg.default")
def neg(low: Lowering, x: ir.Value) -> ir.Value:
    unsigned = low.dtype == ir.DataType.UINT8
    return low.op.Sub(low.tensor(0, low.dtype), x) if unsigned else low.op.Neg(x)


@lower("aten.rsqrt.default")
def rsqrt(low: Lowering, x: ir.Value) -> ir.Value:
    return low.op.Reciprocal(low.op.Sqrt(low.tensor(x, low.dtype)))


@lower("aten.log2.default", "aten.log10.default")
def log_of_base(low: Lowering, x: ir.Value) -> ir.Value:
    base = 2 if "log2" in str(low.node.target) else 10
    return low.op.Mul(low.op.Log(low.tensor(x, low.dtype)), 1 / math.log(base))


@lower("aten.log1p.default")
def log1p(low: Lowering, x: ir.Value) -> ir.Value:
    main, lost = _formulas.log1p_terms(low.op, low.tensor(x, low.dtype))
    return low.op.Add(main, stop_gradient(low, lost))


@lower("aten.expm1.default")
def expm1(low: Lowering, x: ir.Value) -> ir.Value:
    return _formulas.expm1(low.op, low.tensor(x, low.dtype))


@lower("aten.atan2.default")
def atan2(low: Lowering, y: ir.Value, x: ir.Value) -> ir.Value:
    """The angle of (x, y), from the arc tangent of the quotient that is at most 1 in magnitude; no gradient at 0."""
    op = low.op
    y, x = low.tensors(y, x)
    steep = op.Greater(op.Abs(y), op.Abs(x))
    bottom = op.Where(steep, y, x)
    origin = op.Equal(bottom, 0.0)
    top, bottom = op.Where(origin, 0.0, op.Where(steep, x, y)), op.Where(origin, 1.0, bottom)
    angle = op.Atan(op.Div(top, bottom))
    down = op.Less(y, 0.0)
    from_steep = op.Sub(op.Where(down, *_constants(low, -math.pi / 2, math.pi / 2)), angle)
    turn = op.Where(op.Less(x, 0.0), op.Where(down, *_constants(low, -math.pi, math.pi)), 0.0)
    return op.Where(steep, from_steep, op.Add(angle, turn))


def _constants(low: Lowering, *numbers: float) -> tuple[ir.Value, ...]:
    return tuple(low.tensor(number, low.dtype) for number in numbers)


@lower("aten.hypot.default")
def hypot(low: Lowering, a: ir.Value, b: ir.Value) -> ir.Value:
    """With s = max(|a|, |b|): s sqrt((a / s)² + (b / s)²), which cannot overflow; the gradient at 0 is 0.

    It does not depend on s, which has no gradient: those of a maximum and of |x| would be wrong at ties and at 0.
    """
    op = low.op
    a, b = low.tensors(a, b)
    larger = stop_gradient(low, op.Max(op.Abs(a), op.Abs(b)))
    zero = op.Equal(larger, 0.0)
    scale = op.Where(zero, 1.0, larger)
    x, y = op.Div(a, scale), op.Div(b, scale)
    square = op.Add(op.Mul(x, x), op.Mul(y, y))
    length = op.Where(zero, 0.0, op.Mul(scale, op.Sqrt(op.Where(zero, 1.0, square))))
    infinite = op.Or(op.IsInf(a), op.IsInf(b))
    return op.Where(infinite, math.inf, length)


@lower("aten.logaddexp.default")
def logaddexp(low: Lowering, a: ir.Value, b: ir.Value) -> ir.Value:
    """max(a, b) + log(1 + exp(-|a - b|)); equal infinities have the difference 0."""
    op = low.op
    a, b = low.tensors(a, b)
    difference = op.Where(op.Equal(a, b), 0.0, op.Sub(a, b))
    return op.Add(op.Max(a, b), op.Softplus(op.Neg(op.Abs(difference))))


@lower("aten.floor.default", "aten.ceil.default", "aten.trunc.default")
def to_integer(low: Lowering, x: ir.Value) -> ir.Value:
    if not _is_float(x):
        return x
    kind = str(low.node.target).split(".")[1]
    return truncated(low, x) if kind == "trunc" else low.op.emit(kind.capitalize(), x)


@lower("aten.round.default", "aten.round.decimals")
def round_(low: Lowering, x: ir.Value, *, decimals: int = 0) -> ir.Value:
    if not _is_float(x):
        return x
    if decimals == 0:
        return low.op.Round(x)
    power = 10.0 ** abs(decimals)
    if decimals > 0:
        return low.op.Div(low.op.Round(low.op.Mul(x, power)), power)
    return low.op.Mul(low.op.Round(low.op.Div(x, power)), power)


@lower("aten.clamp.default", "aten.clamp_min.default", "aten.clamp_max.default")
def clamp(low: Lowering, x: ir.Value, *bounds: Any, min: Any = None, max: Any = None) -> ir.Value:
    """With numbers as bounds: on them the gradient passes as it does in PyTorch."""
    target = str(low.node.target)
    if bounds:
        min, max = (None, bounds[0]) if "clamp_max" in target else (*bounds, None)[:2]
    x = low.tensor(x, low.dtype)
    if _is_float(x):  # a Clip without a bound has that of the finite numbers
        min, max = -math.inf if min is None else min, math.inf if max is None else max
    limits = [None if bound is None else low.tensor(bound, low.dtype) for bound in (min, max)]
    if low.dtype == ir.DataType.INT16:
        return _clamp_tensor(low, x, *limits)
    y = low.op.Clip(x, *limits)
    if bounds_pass_gradients or not _is_float(x):
        return y
    inside = low.op.And(low.op.Greater(x, limits[0]), low.op.Less(x, limits[1]))
    return low.op.Where(inside, x, stop_gradient(low, y))


@lower("aten.clamp.Tensor", "aten.clamp_min.Tensor", "aten.clamp_max.Tensor")
def clamp_tensor(low: Lowering, x: ir.Value, *bounds: Any, min: Any = None, max: Any = None) -> ir.Value:
    """With tensors as bounds, which get the gradient where they replace an element."""
    target = str(low.node.target)
    if bounds:
        min, max = (None, bounds[0]) if "clamp_max" in target else (*bounds, None)[:2]
    limits = [None if bound is None else low.tensor(bound, low.dtype) for bound in (min, max)]
    return _clamp_tensor(low, low.tensor(x, low.dtype), *limits)


def _clamp_tensor(low: Lowering, x: ir.Value, lowest: ir.Value | None, highest: ir.Value | None) -> ir.Value:
    op = low.op

    def replaced(outside: ir.Value, bound: ir.Value) -> ir.Value:
        if _is_float(bound):  # a bound that is NaN replaces everything
            outside = op.Or(outside, op.IsNaN(bound))
        return select(low, outside, bound, x)

    if lowest is not None:
        x = replaced(op.Less(x, lowest), lowest)
    return x if highest is None else replaced(op.Greater(x, highest), highest)


def select(low: Lowering, condition: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """Returns Where for all dtypes: ONNX Runtime has none for bool and int16, which go through another dtype."""
    wide = {BOOL: ir.DataType.UINT8, ir.DataType.INT16: ir.DataType.INT32}.get(low.dtype, low.dtype)
    chosen = low.op.Where(condition, low.tensor(a, wide), low.tensor(b, wide))
    return low.tensor(chosen, low.dtype)


@lower("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def where(low: Lowering, condition: ir.Value, a: Any, b: Any) -> ir.Value:
    return select(low, low.tensor(condition, BOOL), a, b)


@lower("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(low: Lowering, x: ir.Value, mask: ir.Value, value: Any) -> ir.Value:
    return select(low, mask, value, x)


@lower("aten.lerp.Scalar", "aten.lerp.Tensor")
def lerp(low: Lowering, a: ir.Value, b: ir.Value, weight: Any) -> ir.Value:
    return low.op.Add(a, low.op.Mul(low.tensor(weight, low.dtype), low.op.Sub(b, a)))


@lower("aten.addcmul.default", "aten.addcdiv.default")
def add_product(low: Lowering, x: ir.Value, a: ir.Value, b: ir.Value, *, value: Any = 1) -> ir.Value:
    x, a, b = low.tensors(x, a, b)
    term = low.op.Mul(a, b) if "addcmul" in str(low.node.target) else low.op.Div(a, b)
    return low.op.Add(x, term if value == 1 else low.op.Mul(term, low.tensor(value, low.dtype)))


@lower(
    "aten.clone.default",
    "aten.alias.default",
    "aten.lift_fresh.default",
    "aten.lift.default",
    "aten.contiguous.default",
    "aten._to.default",
    "aten._conj.default",
    "aten.positive.default",
    "prims.copy_strided.default",
    "prims.convert_element_type.default",
)
def same(low: Lowering, x: ir.Value, *_: Any, **__: Any) -> ir.Value:
    """The same elements; a new dtype is given to every result anyway."""
    return x


@lower("aten.detach.default")
def detach(low: Lowering, x: ir.Value) -> ir.Value:
    return stop_gradient(low, x) if _is_float(x) else x


@lower("aten.nan_to_num.default")
def nan_to_num(
    low: Lowering, x: ir.Value, nan: Any = None, posinf: Any = None, neginf: Any = None
) -> ir.Value:
    op = low.op
    if not _is_float(x):
        return x
    limits = np.finfo(low.dtype.numpy()) if low.dtype != ir.DataType.BFLOAT16 else None
    if limits is None:
        raise low.unsupported("bfloat16")
    high = float(limits.max) if posinf is None else posinf
    lowest = float(limits.min) if neginf is None else neginf
    x = op.Where(op.IsNaN(x), 0.0 if nan is None else float(nan), x)
    x = op.Where(op.IsInf(x, detect_negative=0), float(high), x)
    return op.Where(op.IsInf(x, detect_positive=0), float(lowest), x)
