"""Lowers activation functions. At kinks, gradients are the same as PyTorch's."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from onnxtrain import functions
from onnxtrain.ortmodule.lowering import _formulas
from onnxtrain.ortmodule.lowering._table import Lowering, lower


@lower("aten.relu.default")
def relu(low: Lowering, x: ir.Value) -> ir.Value:
    if low.dtype == ir.DataType.BOOL:
        raise low.unsupported("booleans")
    # ONNX Runtime has Relu kernels for int32 and int8, but not for int64 and int16.
    if low.dtype.is_floating_point():
        return low.op.Relu(x)
    zero = low.tensor(0, low.dtype)
    return low.tensor(
        low.op.Max(low.tensor(x, ir.DataType.INT64), low.tensor(zero, ir.DataType.INT64)), low.dtype
    )


@lower("aten.hardtanh.default")
def hardtanh(low: Lowering, x: ir.Value, min_val: Any = -1.0, max_val: Any = 1.0) -> ir.Value:
    # Not Clip: at the bounds, PyTorch's gradient is 0 for hardtanh (and relu6), and 1 for clamp.
    lowest, highest = low.tensor(min_val, low.dtype), low.tensor(max_val, low.dtype)
    if low.dtype == ir.DataType.FLOAT:
        return low.op.call(functions.hardtanh, x, lowest, highest)
    op = low.op
    y = op.Where(op.LessOrEqual(x, lowest), lowest, x)
    y = op.Where(op.GreaterOrEqual(y, highest), highest, y)
    if low.dtype == low.wide_dtype:
        return y
    # PyTorch rounds the bounds to a narrow dtype for the result, but not for the gradient.
    wide, *bounds = low.wide(x, min_val, max_val)
    outside = op.Or(op.LessOrEqual(wide, bounds[0]), op.GreaterOrEqual(wide, bounds[1]))
    return op.Where(outside, op.stop_gradient(y), x)


@lower("aten.leaky_relu.default")
def leaky_relu(low: Lowering, x: ir.Value, negative_slope: float = 0.01) -> ir.Value:
    low.refuse_overflow(negative_slope)
    # ONNX Runtime's LeakyRelu kernel is float32 only, and ONNX keeps alpha in float32.
    if low.is_double:
        return _leaky(low, x, negative_slope)
    return low.op.LeakyRelu(x, alpha=float(negative_slope))


def _leaky(low: Lowering, x: ir.Value, slope: Any) -> ir.Value:
    """Returns `x` where it is positive, and `slope * x` elsewhere."""
    op = low.op
    positive = op.Greater(x, 0.0)
    # Zeros in place of the positive elements, whose product may be infinite, with a gradient of NaN.
    slope = op.Where(positive, 0.0, slope) if isinstance(slope, ir.Value) else slope
    return op.Where(positive, x, op.Mul(op.Where(positive, 0.0, x), slope))


@lower("aten.rrelu_with_noise_functional.default")
def rrelu(
    low: Lowering,
    x: ir.Value,
    noise: ir.Value,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> tuple[ir.Value, ir.Value]:
    # In training, the op draws the slopes.
    if training:
        raise low.unsupported("random slopes, as in training")
    return leaky_relu(low, x, (lower + upper) / 2), noise


@lower("aten.elu.default")
def elu(low: Lowering, x: ir.Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> ir.Value:
    low.refuse_overflow(alpha, scale)
    if input_scale != 1:
        raise low.unsupported(f"input_scale={input_scale}")
    return _scaled_elu(low, x, float(alpha), float(scale), 1.0)


@lower("aten.celu.default")
def celu(low: Lowering, x: ir.Value, alpha: float = 1.0) -> ir.Value:
    if alpha == 0:
        raise low.unsupported("alpha=0")
    return _scaled_elu(low, x, float(alpha), 1.0, float(alpha))


def _scaled_elu(low: Lowering, x: ir.Value, alpha: float, scale: float, width: float) -> ir.Value:
    """Returns `scale * x` where `x` is positive, and `scale * alpha * (exp(x / width) - 1)` elsewhere."""
    # Not ONNX's Elu, Selu and Celu, whose kernels cancel digits near 0: Elu(-1e-10) is 0. They also take longer.
    op = low.op
    (x,) = low.wide(x)

    def times(value: ir.Value, number: float) -> ir.Value:
        return value if number == 1 else op.Mul(value, number)

    below = op.Min(x, 0.0)
    scaled = below if width == 1 else op.Div(below, width)
    exponential = op.Exp(scaled)
    negative_part = times(_formulas.expm1(op, scaled, exponential), scale * alpha)
    y = op.Add(times(op.Relu(x), scale), negative_part)
    # As in PyTorch, NaN counts as positive, and 0 as negative.
    left = scale * alpha / width
    exponential = op.Where(op.IsNaN(x), 1.0, exponential)
    if left == scale:
        return low.with_slope(y, x, times(exponential, scale))
    is_left = op.Cast(op.LessOrEqual(x, 0.0), to=x.dtype)
    return low.with_slope(y, x, op.Add(op.Mul(op.Sub(times(exponential, left), scale), is_left), scale))


@lower("aten.gelu.default")
def gelu(low: Lowering, x: ir.Value, *, approximate: str = "none") -> ir.Value:
    op = low.op
    if low.is_double:
        # Gelu has no float64 kernel. Neither has Erf; sessions/_float64.py replaces Erf and Tanh with formulas after
        # differentiation.
        if approximate == "none":
            inner = op.Erf(op.Mul(x, math.sqrt(0.5)))
        else:
            cubic = op.Mul(op.Add(op.Mul(op.Mul(x, x), 0.044715), 1.0), x)
            inner = op.Tanh(op.Mul(cubic, math.sqrt(2 / math.pi)))
        return op.Mul(op.Mul(x, 0.5), op.Add(inner, 1.0))
    return low.op.Gelu(x, approximate=approximate)


@lower("aten.silu.default")
def silu(low: Lowering, x: ir.Value) -> ir.Value:
    # ONNX has Swish since opset 24. In float32, `fuse_forward` fuses the two nodes into one function.
    if low.dtype == ir.DataType.FLOAT:
        return low.op.Mul(x, low.op.Sigmoid(x))
    (x,) = low.wide(x)
    return low.op.call(functions.silu, x)


@lower("aten.mish.default")
def mish(low: Lowering, x: ir.Value) -> ir.Value:
    if low.is_double:
        op = low.op
        tanh = op.Tanh(op.Softplus(x))
        slope = op.Mul(op.Mul(x, op.Sigmoid(x)), op.Sub(1.0, op.Mul(tanh, tanh)))
        return low.with_slope(op.Mul(x, tanh), x, op.Add(tanh, slope))
    return low.op.Mish(x)


@lower("aten.softplus.default")
def softplus(low: Lowering, x: ir.Value, beta: float = 1, threshold: float = 20) -> ir.Value:
    low.refuse_overflow(beta, threshold)
    op = low.op
    (x,) = low.wide(x)
    scaled = x if beta == 1 else op.Mul(x, float(beta))
    result = op.Softplus(scaled) if beta == 1 else op.Div(op.Softplus(scaled), float(beta))
    # PyTorch returns x above the threshold. For x > 20, softplus(x) rounds to x in all dtypes but float64.
    if threshold >= 20 and beta == 1 and low.dtype != ir.DataType.DOUBLE:
        return result
    return op.Where(op.Greater(scaled, float(threshold)), x, result)


@lower("aten.log_sigmoid_forward.default")
def log_sigmoid(low: Lowering, x: ir.Value) -> tuple[ir.Value, None]:
    # The second result is a buffer for PyTorch's backward, which is not used here.
    return low.op.Neg(low.op.Softplus(low.op.Neg(x))), None


@lower("aten.hardswish.default")
def hardswish(low: Lowering, x: ir.Value) -> ir.Value:
    op = low.op
    if low.is_double:
        # HardSigmoid, which HardSwish is decomposed into, has a float32 kernel only. x * 0 keeps NaN.
        above, below = op.Greater(x, -3.0), op.Less(x, 3.0)
        middle = op.Where(above, op.Mul(x, op.Div(op.Add(x, 3.0), 6.0)), op.Mul(x, 0.0))
        slope = op.Where(op.LessOrEqual(x, -3.0), 0.0, op.Add(op.Div(x, 3.0), 0.5))
        return low.with_slope(op.Where(below, middle, x), x, op.Where(below, slope, 1.0))
    return op.HardSwish(x)


@lower("aten.hardsigmoid.default")
def hardsigmoid(low: Lowering, x: ir.Value) -> ir.Value:
    if low.is_double:
        op, shifted = low.op, low.op.Add(x, 3.0)
        outside = op.stop_gradient(op.Div(hardtanh(low, shifted, 0.0, 6.0), 6.0))
        inside = op.And(op.Greater(x, -3.0), op.Less(x, 3.0))
        return op.Where(inside, op.Div(shifted, 6.0), outside)
    return low.op.HardSigmoid(x, alpha=1 / 6, beta=0.5)


@lower("aten.hardshrink.default")
def hardshrink(low: Lowering, x: ir.Value, lambd: float = 0.5) -> ir.Value:
    op = low.op
    low.refuse_overflow(lambd)
    # Not Shrink, which returns 0 for NaN.
    inside = op.And(op.GreaterOrEqual(x, -float(lambd)), op.LessOrEqual(x, float(lambd)))
    return op.Where(inside, 0.0, x)


@lower("aten.softshrink.default")
def softshrink(low: Lowering, x: ir.Value, lambd: float = 0.5) -> ir.Value:
    op, bound = low.op, float(lambd)
    # PyTorch rounds the bound to a narrow dtype for the gradient, but not for the result.
    lowest, rounded = low.wide(*low.tensors(-bound, bound))
    (x,) = low.wide(x)
    inside = op.And(op.GreaterOrEqual(x, -bound), op.LessOrEqual(x, bound))
    has_gradient = op.Not(op.And(op.GreaterOrEqual(x, lowest), op.LessOrEqual(x, rounded)))
    # Not Shrink, which returns 0 for NaN: here NaN is outside, and gets the gradient, as in PyTorch.
    ends = op.Where(op.Greater(x, 0.0), op.const(bound, like=x), op.const(-bound, like=x))
    y = op.Sub(x, ends)
    return op.Where(has_gradient, y, op.stop_gradient(op.Where(inside, 0.0, y)))


@lower("aten._prelu_kernel.default")
def prelu(low: Lowering, x: ir.Value, weight: ir.Value) -> ir.Value:
    if low.is_double:
        # PRelu has a float32 kernel only.
        return _leaky(low, x, weight)
    return low.op.PRelu(x, weight)


@lower("aten.threshold.default")
def threshold(low: Lowering, x: ir.Value, bound: Any, value: Any) -> ir.Value:
    if not low.dtype.is_floating_point():
        below = low.op.LessOrEqual(x, low.tensor(bound, low.dtype))
    else:
        low.refuse_overflow(bound)
        # PyTorch doesn't round the bound to a narrow dtype.
        below = low.op.LessOrEqual(*low.wide(x, bound))
    return low.op.Where(below, low.tensor(value, low.dtype), x)


@lower("aten.glu.default")
def glu(low: Lowering, x: ir.Value, dim: int = -1) -> ir.Value:
    op = low.op
    left, right = op.Split(x, axis=dim, num_outputs=2, _outputs=2)
    left, right = low.wide(left, right)
    # Not Sigmoid, whose kernel is exact to 1e-7 only: 1 - gate may be smaller.
    gate = _formulas.sigmoid(op, right)
    # Not the derivative of the product: cotangent * left may overflow where the gate is closed.
    slope = op.Mul(op.Mul(op.Sub(1.0, gate), gate), left)
    return low.with_slopes(op.Mul(left, gate), left, gate, right, slope)
