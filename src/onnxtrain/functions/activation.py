"""Defines SiLU, Hardtanh, variants of Softmax, and gradients of activations and softmaxes."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.emitter import AttributeRef, Emitter

from ._composite import composite


@composite("SoftmaxGradient", ["y", "ct"], {"axis": ir.AttributeType.INT})
def softmax_gradient(op: Emitter, y: ir.Value, ct: ir.Value, *, axis: AttributeRef) -> ir.Value:
    """VJP of Softmax: y * (ct - sum(ct * y, axis)), with y = softmax(x, axis)."""
    # ct * y is computed once, for both the sum and the result.
    product = op.Mul(ct, y)
    total = op.ReduceSum(product, op.Unsqueeze(op.ints(axis), [0]), keepdims=1)
    return op.Sub(product, op.Mul(y, total))


@composite("SafeSoftmax", ["x"], {"axis": ir.AttributeType.INT})
def safe_softmax(op: Emitter, x: ir.Value, *, axis: AttributeRef) -> ir.Value:
    """Computes Softmax, with zeros for fully masked rows (all -inf). `SoftmaxGradient` is its VJP."""
    most = op.ReduceMax(x, op.Unsqueeze(op.ints(axis), [0]), keepdims=1)
    masked = op.Equal(most, -math.inf)
    # The inner Where keeps this Softmax finite: otherwise, NaN would pass through the gradient of the outer Where.
    return op.Where(masked, 0.0, op.Softmax(op.Where(masked, 0.0, x), axis=axis))


@composite("LogSoftmaxOfRows", ["x"])
def log_softmax_of_rows(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes LogSoftmax along the last axis. Unlike ONNX Runtime's own kernel, the native kernel can overwrite x."""
    return op.LogSoftmax(x, axis=-1)


@composite("LogSoftmaxGradient", ["y", "ct"], {"axis": ir.AttributeType.INT})
def log_softmax_gradient(op: Emitter, y: ir.Value, ct: ir.Value, *, axis: AttributeRef) -> ir.Value:
    """VJP of LogSoftmax: ct - exp(y) * sum(ct, axis), with y = log_softmax(x, axis)."""
    total = op.ReduceSum(ct, op.Unsqueeze(op.ints(axis), [0]), keepdims=1)
    return op.Sub(ct, op.Mul(op.Exp(y), total))


@composite("GeluGradient", ["x", "ct"])
def gelu_gradient(op: Emitter, x: ir.Value, ct: ir.Value) -> ir.Value:
    """VJP of GELU: ct * (Φ(x) + x φ(x)), with the standard normal's distribution function Φ and density φ."""
    s = op.Mul(x, math.sqrt(0.5))
    # With s = x / sqrt(2), Φ(x) = erf(s) / 2 + 1/2. HardSigmoid computes this in one pass over memory; because |erf| <=
    # 1, it never clamps.
    distribution = op.HardSigmoid(op.Erf(s), alpha=0.5, beta=0.5)
    # x φ(x) = s exp(-s²) / sqrt(π). The factor 1 / sqrt(π) is free inside the exponential.
    density = op.Exp(op.Sub(-0.5 * math.log(math.pi), op.Mul(s, s)))
    return op.Mul(ct, op.Add(distribution, op.Mul(s, density)))


@composite("GeluTanhGradient", ["x", "ct"])
def gelu_tanh_gradient(op: Emitter, x: ir.Value, ct: ir.Value) -> ir.Value:
    """VJP of tanh-approximated GELU: ct * (1 + t + x (1 - t²) k (1 + 3 * 0.044715 x²)) / 2.

    With t = tanh(k (x + 0.044715 x³)) and k = sqrt(2 / π), the forward output is x * (1 + t) / 2.
    """
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    square = op.Mul(x, x)
    tanh = op.Tanh(op.Mul(x, op.Add(op.Mul(square, scale * cubic), scale)))
    inner = op.Add(op.Mul(square, 3 * scale * cubic), scale)
    slope = op.Mul(op.Mul(x, inner), op.Sub(1.0, op.Mul(tanh, tanh)))
    return op.Mul(ct, op.Mul(op.Add(op.Add(tanh, 1.0), slope), 0.5))


@composite("MishGradient", ["x", "ct"])
def mish_gradient(op: Emitter, x: ir.Value, ct: ir.Value) -> ir.Value:
    """VJP of Mish: ct * (t + x (1 - t²) sigmoid(x)), with t = tanh(softplus(x))."""
    # Recomputed from x: saving tanh(softplus(x)) would cost another tensor of the size of x.
    tanh = op.Tanh(op.Softplus(x))
    slope = op.Mul(op.Mul(x, op.Sigmoid(x)), op.Sub(1.0, op.Mul(tanh, tanh)))
    return op.Mul(ct, op.Add(tanh, slope))


@composite("ReluGradient", ["y", "ct"])
def relu_gradient(op: Emitter, y: ir.Value, ct: ir.Value) -> ir.Value:
    """VJP of Relu: 0 where y <= 0, else ct."""
    # Not Greater(y, 0): as in PyTorch, ct passes where y is NaN.
    return op.Where(op.LessOrEqual(y, 0.0), 0.0, ct)


@composite("ReluGradientOfFinite", ["y", "ct"])
def relu_gradient_of_finite(op: Emitter, y: ir.Value, ct: ir.Value) -> ir.Value:
    """VJP of Relu for finite cotangents: multiplies ct by a mask, which is faster than ReluGradient's Where."""
    # ONNX Runtime's Mul is several times as fast as its Where (1 M elements: 2.1 and 9.3 ms with one thread), but an
    # infinite ct times 0 would be NaN.
    return op.Mul(ct, op.Cast(op.Not(op.LessOrEqual(y, 0.0)), to=ct.dtype))


@composite("ClipGradient", ["x", "low", "high", "ct"])
def clip_gradient(op: Emitter, x: ir.Value, low: ir.Value, high: ir.Value, ct: ir.Value) -> ir.Value:
    """VJP of Clip: ct where low <= x <= high, else 0. The bounds are scalars."""
    return op.Where(_within(op, x, low, high), ct, 0.0)


@composite("ClipGradientOfFinite", ["x", "low", "high", "ct"])
def clip_gradient_of_finite(
    op: Emitter, x: ir.Value, low: ir.Value, high: ir.Value, ct: ir.Value
) -> ir.Value:
    """VJP of Clip for finite cotangents: multiplies ct by a mask, which is faster than ClipGradient's Where."""
    return op.Mul(ct, op.Cast(_within(op, x, low, high), to=ct.dtype))


def _within(op: Emitter, x: ir.Value, low: ir.Value, high: ir.Value) -> ir.Value:
    return op.And(op.GreaterOrEqual(x, low), op.LessOrEqual(x, high))


@composite("Hardtanh", ["x", "low", "high"])
def hardtanh(op: Emitter, x: ir.Value, low: ir.Value, high: ir.Value) -> ir.Value:
    """Computes Hardtanh, e.g. ReLU6: a Clip whose gradient is zero at the scalar bounds `low` and `high`."""
    # A composite op only because its gradient differs from Clip's.
    return op.Clip(x, low, high)


@composite("HardtanhGradient", ["y", "low", "high", "ct"])
def hardtanh_gradient(op: Emitter, y: ir.Value, low: ir.Value, high: ir.Value, ct: ir.Value) -> ir.Value:
    """VJP of Hardtanh: 0 where y <= low or y >= high, else ct. The bounds are scalars."""
    # In terms of the output y, so that x need not be saved for the backward pass.
    return op.Where(_beyond(op, y, low, high), 0.0, ct)


@composite("HardtanhGradientOfFinite", ["y", "low", "high", "ct"])
def hardtanh_gradient_of_finite(
    op: Emitter, y: ir.Value, low: ir.Value, high: ir.Value, ct: ir.Value
) -> ir.Value:
    """VJP of Hardtanh for finite cotangents: multiplies ct by a mask, which is faster than HardtanhGradient's Where."""
    return op.Mul(ct, op.Cast(op.Not(_beyond(op, y, low, high)), to=ct.dtype))


def _beyond(op: Emitter, y: ir.Value, low: ir.Value, high: ir.Value) -> ir.Value:
    return op.Or(op.LessOrEqual(y, low), op.GreaterOrEqual(y, high))


@composite("SigmoidGradient", ["y", "ct"])
def sigmoid_gradient(op: Emitter, y: ir.Value, ct: ir.Value) -> ir.Value:
    """VJP of Sigmoid: ct * y (1 - y)."""
    return op.Mul(ct, op.Mul(y, op.Sub(1.0, y)))


@composite("Silu", ["x"])
def silu(op: Emitter, x: ir.Value) -> ir.Value:
    """Computes SiLU: x * sigmoid(x)."""
    return op.Mul(x, op.Sigmoid(x))


@composite("SiluGradient", ["x", "ct"])
def silu_gradient(op: Emitter, x: ir.Value, ct: ir.Value) -> ir.Value:
    """VJP of SiLU: ct * s (1 + x (1 - s)), with s = sigmoid(x)."""
    # In terms of x, because the output x * sigmoid(x) does not determine x.
    sigmoid = op.Sigmoid(x)
    return op.Mul(ct, op.Mul(sigmoid, op.Add(op.Mul(x, op.Sub(1.0, sigmoid)), 1.0)))


@composite("TanhGradient", ["y", "ct"])
def tanh_gradient(op: Emitter, y: ir.Value, ct: ir.Value) -> ir.Value:
    """VJP of Tanh: ct * (1 - y²)."""
    # In terms of the output y, so that x need not be saved for the backward pass.
    return op.Mul(ct, op.Sub(1.0, op.Mul(y, y)))
