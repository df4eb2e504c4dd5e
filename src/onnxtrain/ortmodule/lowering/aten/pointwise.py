"""Lowers elementwise functions, clamp and where. For arithmetic, see `arithmetic.py`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.emitter import Emitter
from onnxtrain.ortmodule._torch import bounds_pass_gradients
from onnxtrain.ortmodule.lowering import _formulas
from onnxtrain.ortmodule.lowering._table import Lowering, is_float, lower
from onnxtrain.ortmodule.lowering.aten.arithmetic import truncated

BOOL = ir.DataType.BOOL

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
    """Returns a lowering that casts its argument to the dtype of PyTorch's result, and emits one ONNX op."""
    return lambda low, x: low.op.emit(op_type, low.tensor(x, low.dtype))


for _aten, _onnx in _UNARY.items():
    lower(f"aten.{_aten}.default")(_unary(_onnx))


def _refuse_booleans(low: Lowering, x: ir.Value) -> None:
    if x.dtype == BOOL:
        raise low.unsupported("booleans")


@lower("aten.abs.default", "aten.sign.default", "aten.sgn.default")
def magnitude_or_sign(low: Lowering, x: ir.Value) -> ir.Value:
    if "abs" in str(low.node.target):
        _refuse_booleans(low, x)
        return low.op.Abs(x)
    if low.dtype == BOOL:
        return x
    # PyTorch's sign of NaN is 0, ONNX Runtime's is NaN.
    sign = low.op.Sign(x)
    return low.op.Where(low.op.IsNaN(x), 0.0, sign) if is_float(x) else sign


@lower("aten.signbit.default")
def signbit(low: Lowering, x: ir.Value) -> ir.Value:
    op = low.op
    if not is_float(x):
        return op.Less(low.tensor(x, ir.DataType.INT64), op.const(0))
    # -0 is not less than 0, but its reciprocal is.
    return op.Less(op.Where(op.Equal(x, 0.0), op.Reciprocal(x), x), 0.0)


@lower("aten.copysign.Tensor", "aten.copysign.Scalar")
def copysign(low: Lowering, x: ir.Value, y: Any) -> ir.Value:
    op = low.op
    x, y = low.tensors(x, y)
    # The zero, computed from `y`, makes the gradient of `y` zero instead of None, as in PyTorch.
    zero = op.Mul(op.Where(op.IsNaN(y), 0.0, op.Sign(y)), 0.0)
    sign = op.Add(op.Where(signbit(low, y), op.const(-1.0, like=x), op.const(1.0, like=x)), zero)
    result = op.Mul(op.Abs(x), sign)
    # As in PyTorch, the ratio of both, NaN for infinities, and 0 at 0.
    is_zero = op.Equal(x, 0.0)
    return low.with_slopes(result, x, op.Where(is_zero, 0.0, op.Div(result, x)), y, op.Mul(sign, 0.0))


@lower("aten.neg.default")
def neg(low: Lowering, x: ir.Value) -> ir.Value:
    # ONNX's Neg supports signed types only.
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
    # The derivative of the sum is that of the first term.
    log, correction = _formulas.log1p_terms(low.op, low.tensor(x, low.dtype))
    return low.op.Add(log, low.op.stop_gradient(correction))


@lower("aten.expm1.default")
def expm1(low: Lowering, x: ir.Value) -> ir.Value:
    (x,) = low.wide(x)
    y = _formulas.expm1(low.op, x)
    return low.with_slope(y, x, low.op.Add(y, 1.0))


@lower("aten.atan2.default")
def atan2(low: Lowering, y: ir.Value, x: ir.Value) -> ir.Value:
    op = low.op
    # PyTorch's derivatives: 0 where the sum of squares is 0, and infinite or NaN where its reciprocal overflows.
    y, x = low.tensors(y, x)
    squares = op.Add(op.Mul(x, x), op.Mul(y, y))
    inverse = op.Where(op.Equal(squares, 0.0), 0.0, op.Reciprocal(squares))
    slope_y, slope_x = low.wide(op.Mul(x, inverse), op.Neg(op.Mul(y, inverse)))
    y, x = low.wide(y, x)
    # Divides the smaller by the larger magnitude, which cannot overflow.
    steep = op.Greater(op.Abs(y), op.Abs(x))
    bottom = op.Where(steep, y, x)
    # The quotient of two infinities is replaced with the quotient of their signs.
    origin = op.And(op.Equal(x, 0.0), op.Equal(y, 0.0))
    infinite = op.And(op.IsInf(x), op.IsInf(y))
    top, bottom = op.Where(steep, x, y), op.Where(origin, 1.0, bottom)
    top = op.Where(origin, 0.0, op.Where(infinite, op.Sign(y), top))
    angle = op.Atan(op.Div(top, op.Where(infinite, op.Sign(x), bottom)))
    # The sign of a zero shows from which side it is approached.
    down = signbit(low, y)
    from_steep = op.Sub(op.Where(down, *_constants(low, -math.pi / 2, math.pi / 2)), angle)
    turn = op.Where(signbit(low, x), op.Where(down, *_constants(low, -math.pi, math.pi)), 0.0)
    result = op.Where(steep, from_steep, op.Add(angle, turn))
    return low.with_slopes(result, y, slope_y, x, slope_x)


def _constants(low: Lowering, *numbers: float) -> tuple[ir.Value, ...]:
    """Returns the numbers as scalars of dtype `low.wide_dtype`."""
    return low.wide(*numbers)


@lower("aten.hypot.default")
def hypot(low: Lowering, a: ir.Value, b: ir.Value) -> ir.Value:
    """Lowers to s sqrt((a / s)² + (b / s)²) with s = max(|a|, |b|), which cannot overflow."""
    op = low.op
    a, b = low.wide(a, b)
    larger = op.Max(op.Abs(a), op.Abs(b))
    scale = op.Where(op.Equal(larger, 0.0), 1.0, larger)
    x, y = op.Div(a, scale), op.Div(b, scale)
    length = op.Mul(scale, op.Sqrt(op.Add(op.Mul(x, x), op.Mul(y, y))))
    infinite = op.Or(op.IsInf(a), op.IsInf(b))
    length = op.Where(infinite, math.inf, length)
    # At (0, 0) the gradient is NaN, as is PyTorch's, which divides by the rounded length.
    (divisor,) = low.wide(low.tensor(length, low.dtype))
    return low.with_slopes(length, a, op.Div(a, divisor), b, op.Div(b, divisor))


@lower("aten.logaddexp.default")
def logaddexp(low: Lowering, a: ir.Value, b: ir.Value) -> ir.Value:
    op = low.op
    a, b = low.wide(a, b)
    # As in PyTorch: NaN where both are the same infinity.
    difference = op.Sub(b, a)
    slope_a, slope_b = (op.Reciprocal(op.Add(op.Exp(x), 1.0)) for x in (difference, op.Neg(difference)))
    return low.with_slopes(log_of_sum(op, a, b), a, slope_a, b, slope_b)


def log_of_sum(op: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    """Returns log(exp(a) + exp(b)) of two tensors of the same floating dtype."""
    # max(a, b) + log(1 + exp(-|a - b|)). The difference of equal infinities is 0 here, not NaN.
    difference = op.Where(op.Equal(a, b), 0.0, op.Sub(a, b))
    return op.Add(op.Max(a, b), op.Softplus(op.Neg(op.Abs(difference))))


@lower("aten.floor.default", "aten.ceil.default", "aten.trunc.default")
def to_integer(low: Lowering, x: ir.Value) -> ir.Value:
    _refuse_booleans(low, x)
    if not is_float(x):
        return x
    kind = str(low.node.target).split(".")[1]
    return truncated(low, x) if kind == "trunc" else low.op.emit(kind.capitalize(), x)


@lower("aten.round.default", "aten.round.decimals")
def round_(low: Lowering, x: ir.Value, *, decimals: int = 0) -> ir.Value:
    _refuse_booleans(low, x)
    if not is_float(x):
        return x
    # ONNX's Round, like PyTorch's, rounds halves to even.
    if decimals == 0:
        return low.op.Round(x)
    (x,) = low.wide(x)
    power = 10.0 ** abs(decimals)
    if decimals > 0:
        return low.op.Div(low.op.Round(low.op.Mul(x, power)), power)
    return low.op.Mul(low.op.Round(low.op.Div(x, power)), power)


def _bounds(low: Lowering, bounds: tuple[Any, ...], min: Any, max: Any) -> tuple[Any, Any]:
    """Returns (min, max) of a clamp op, from its positional arguments `bounds` or from its keyword arguments."""
    if not bounds:
        return min, max
    return (None, bounds[0]) if "clamp_max" in str(low.node.target) else (*bounds, None)[:2]


@lower("aten.clamp.default", "aten.clamp_min.default", "aten.clamp_max.default")
def clamp(low: Lowering, x: ir.Value, *bounds: Any, min: Any = None, max: Any = None) -> ir.Value:
    min, max = _bounds(low, bounds, min, max)
    x = low.tensor(x, low.dtype)
    # With a bound omitted, ONNX Runtime clips infinities to the largest finite number.
    if is_float(x):
        min, max = -math.inf if min is None else min, math.inf if max is None else max
    limits = [None if bound is None else low.tensor(bound, low.dtype) for bound in (min, max)]
    # A NaN bound makes all of PyTorch's results NaN. ONNX Runtime has no Clip kernel for int16.
    has_nan = any(isinstance(bound, float) and math.isnan(bound) for bound in (min, max))
    if has_nan or low.dtype == ir.DataType.INT16:
        return _clamp_tensor(low, x, *limits)
    y = low.op.Clip(x, *limits)
    if bounds_pass_gradients or not is_float(x):
        return y
    inside = low.op.And(low.op.Greater(x, limits[0]), low.op.Less(x, limits[1]))
    return low.op.Where(inside, x, low.op.stop_gradient(y))


@lower("aten.clamp.Tensor", "aten.clamp_min.Tensor", "aten.clamp_max.Tensor")
def clamp_tensor(low: Lowering, x: ir.Value, *bounds: Any, min: Any = None, max: Any = None) -> ir.Value:
    min, max = _bounds(low, bounds, min, max)
    # Not Clip, because a tensor bound gets the gradient of the elements that it replaces.
    limits = [None if bound is None else low.tensor(bound, low.dtype) for bound in (min, max)]
    return _clamp_tensor(low, low.tensor(x, low.dtype), *limits)


def _clamp_tensor(low: Lowering, x: ir.Value, lowest: ir.Value | None, highest: ir.Value | None) -> ir.Value:
    """Clamps `x` with Where, so that a bound gets the gradient of the elements that it replaces."""
    y = _clamped(low, x, lowest, highest)
    if not is_float(x):
        return y
    # PyTorch's gradients: none where an element or a bound is NaN, or where a bound equals the other.
    op, result = low.op, low.op.stop_gradient(y)
    inside = []
    if highest is not None:
        inside.append(op.LessOrEqual(x, highest))
        beyond = op.Greater(x, highest)
        beyond = beyond if lowest is None else op.Or(beyond, op.Less(highest, lowest))
        result = select(low, beyond, highest, result)
    if lowest is not None:
        inside.append(op.GreaterOrEqual(x, lowest))
        below = op.Less(x, lowest)
        below = below if highest is None else op.And(below, op.Less(lowest, highest))
        result = select(low, below, lowest, result)
    return select(low, functools.reduce(op.And, inside), x, result) if inside else y


def _clamped(low: Lowering, x: ir.Value, lowest: ir.Value | None, highest: ir.Value | None) -> ir.Value:
    """Returns `x` limited to the range between the bounds. The result is NaN where a bound is NaN."""
    op = low.op

    def replaced(outside: ir.Value, bound: ir.Value) -> ir.Value:
        # As in PyTorch, a NaN bound replaces every element.
        if is_float(bound):
            outside = op.Or(outside, op.IsNaN(bound))
        return select(low, outside, bound, x)

    if lowest is not None:
        x = replaced(op.Less(x, lowest), lowest)
    return x if highest is None else replaced(op.Greater(x, highest), highest)


def select(low: Lowering, condition: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """Returns `Where(condition, a, b)` in the dtype of the node's result."""
    # ONNX Runtime has no Where kernels for bool and int16.
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
    op = low.op
    if not low.dtype.is_floating_point():
        raise low.unsupported("integers")
    a, b = low.wide(a, b)
    # From the nearer end, as in PyTorch: a + (b - a) is not b if `a` is much larger than `b`.
    if isinstance(weight, int | float):
        near = abs(weight) < 0.5
        step = op.Mul(low.tensor(weight if near else weight - 1, low.wide_dtype), op.Sub(b, a))
        return op.Add(a if near else b, step)
    (weight,) = low.wide(weight)
    is_near = op.Less(op.Abs(weight), 0.5)
    start, distance = op.Where(is_near, a, b), op.Where(is_near, weight, op.Sub(weight, 1.0))
    return op.Add(start, op.Mul(distance, op.Sub(b, a)))


@lower("aten.addcmul.default", "aten.addcdiv.default")
def add_product(low: Lowering, x: ir.Value, a: ir.Value, b: ir.Value, *, value: Any = 1) -> ir.Value:
    op = low.op
    low.refuse_overflow(value)
    # As PyTorch's gradient rounds it.
    (square,) = low.wide(op.Mul(*low.tensors(b, b)))
    x, a, b = low.wide(x, a, b)
    # In PyTorch's order, which matters where a product overflows.
    scaled = a if isinstance(value, int | float) and value == 1 else op.Mul(a, *low.wide(value))
    if "addcmul" in str(low.node.target):
        return op.Add(x, op.Mul(scaled, b))
    quotient = op.Div(scaled, b)
    if not is_float(x):
        return op.Add(x, quotient)
    factor = op.Reciprocal(b) if scaled is a else op.Div(*low.wide(value), b)
    return op.Add(x, low.with_slopes(quotient, a, factor, b, op.Neg(op.Div(scaled, square))))


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
def identity(low: Lowering, x: ir.Value, *_: Any, **__: Any) -> ir.Value:
    return x


@lower("aten.detach.default")
def detach(low: Lowering, x: ir.Value) -> ir.Value:
    return low.op.stop_gradient(x) if is_float(x) else x


@lower("aten.nan_to_num.default")
def nan_to_num(
    low: Lowering, x: ir.Value, nan: Any = None, posinf: Any = None, neginf: Any = None
) -> ir.Value:
    op = low.op
    if not is_float(x):
        return x
    limits = torch.finfo(low.result.dtype)
    high = float(limits.max) if posinf is None else posinf
    lowest = float(limits.min) if neginf is None else neginf
    x = op.Where(op.IsNaN(x), 0.0 if nan is None else float(nan), x)
    x = op.Where(op.IsInf(x, detect_negative=0), float(high), x)
    return op.Where(op.IsInf(x, detect_positive=0), float(lowest), x)
