"""Registers the VJPs of activation functions."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import Cotangents, defvjp, nondifferentiable, vjp
from onnxtrain.autodiff.rules._composite import composite_vjp
from onnxtrain.emitter import Emitter
from onnxtrain.functions import (
    gelu_gradient,
    gelu_tanh_gradient,
    hardtanh,
    hardtanh_gradient,
    hardtanh_gradient_of_finite,
    log_softmax_gradient,
    mish_gradient,
    relu_gradient,
    relu_gradient_of_finite,
    safe_softmax,
    sigmoid_gradient,
    silu,
    silu_gradient,
    softmax_gradient,
    tanh_gradient,
    with_slope,
    with_slopes,
)


def _positive(op: Emitter, x: ir.Value | None) -> ir.Value:
    return op.Greater(x, 0.0)


def _by_side(op: Emitter, x: ir.Value, left: ir.Value, right: Any) -> ir.Value:
    """Returns `left` where x <= 0, else `right`. NaN selects `right`, as in PyTorch's Elu, Selu and Celu."""
    return op.Where(op.LessOrEqual(x, 0.0), left, right)


# Kinks follow PyTorch: relu'(0) = 0, and LeakyRelu, PRelu, Elu, Selu and Celu use the left slope at 0. Relu's VJP reads
# y instead of x: x need not be kept, and the next op usually keeps y anyway.
defvjp(
    "Relu",
    X=lambda op, n, ct: op.call(
        relu_gradient_of_finite if n.is_mixed(n.out.Y) else relu_gradient, n.out.Y, ct
    ),
)


# Random masks make ONNX Runtime's Where take 8 to 15 times as long as all ops of the products below (2 M elements, one
# thread: 23 and 1.6 ms). A product with an infinite cotangent or a NaN differs from Where only if a factor is zero.
def _where(op: Emitter, n: NodeView, mask: ir.Value, ct: ir.Value) -> ir.Value:
    """Returns ct where `mask` is true, else 0."""
    if n.is_mixed(n.outputs[0]):
        return op.Mul(ct, op.Cast(mask, to=ct.dtype))
    return op.Where(mask, ct, 0.0)


@vjp("LeakyRelu", wrt=("X",))
def leaky_relu(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of LeakyRelu: ct for x > 0, else ct * alpha."""
    alpha, positive = n.attr("alpha"), _positive(op, n.X)
    if 0 < alpha <= 1 or (alpha == 0 and n.is_mixed(n.out.Y)):
        return op.Mul(ct, op.Max(op.Cast(positive, to=ct.dtype), alpha))
    return op.Where(positive, ct, op.Mul(ct, alpha))


def _prelu_input(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """Returns ct for x > 0, else ct * slope."""
    positive = _positive(op, n.X)
    if n.is_mixed(n.outputs[0]):
        # The factor is 1 + 0 * slope or 0 + 1 * slope, without rounding. It is NaN for an infinite slope.
        one = op.Cast(positive, to=ct.dtype)
        return op.Mul(ct, op.Add(one, op.Mul(op.Sub(1.0, one), n.slope)))
    return op.Where(positive, ct, op.Mul(ct, n.slope))


def _prelu_slope(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """Returns 0 for x > 0, else ct * x."""
    if n.is_mixed(n.outputs[0]):
        return op.Mul(ct, op.Min(n.X, 0.0))
    return op.Where(_positive(op, n.X), 0.0, op.Mul(ct, n.X))


defvjp("PRelu", broadcasts=True, X=_prelu_input, slope=_prelu_slope)


@vjp("Elu", wrt=("X",))
def elu(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Elu: ct for x > 0, else ct * alpha * exp(x), where alpha * exp(x) = y + alpha."""
    if n.attr("alpha") == 1 and n.is_mixed(n.out.Y):
        return op.Mul(ct, op.Add(op.Min(n.out.Y, 0.0), 1.0))
    return _by_side(op, n.X, op.Mul(ct, op.Add(n.out.Y, n.attr("alpha"))), ct)


@vjp("Selu", wrt=("X",))
def selu(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Selu: ct times gamma for x > 0, else times gamma * alpha * exp(x) = y + gamma * alpha."""
    gamma = n.attr("gamma")
    left = op.Add(n.out.Y, gamma * n.attr("alpha"))
    return op.Mul(ct, _by_side(op, n.X, left, gamma))


@vjp("Celu", wrt=("X",))
def celu(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Celu: ct for x > 0, else ct * exp(x / alpha), where exp(x / alpha) = y / alpha + 1."""
    if n.attr("alpha") > 0 and n.is_mixed(n.out.Y):
        return op.Mul(ct, op.Add(op.Div(op.Min(n.out.Y, 0.0), n.attr("alpha")), 1.0))
    left = op.Add(op.Div(n.out.Y, n.attr("alpha")), 1.0)
    return _by_side(op, n.X, op.Mul(ct, left), ct)


# In terms of the outputs, y (1 - y) and 1 - y² need no further exponential.
defvjp("Sigmoid", X=lambda op, n, ct: op.call(sigmoid_gradient, n.out.Y, ct))
defvjp("Tanh", input=lambda op, n, ct: op.call(tanh_gradient, n.out.output, ct))
defvjp("Softplus", X=lambda op, n, ct: op.Mul(ct, op.Sigmoid(n.X)))


@vjp("Softsign", wrt=("input",))
def softsign(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Softsign: ct / (1 + |x|)²."""
    root = op.Add(op.Abs(n.input), 1.0)
    return op.Div(ct, op.Mul(root, root))


@vjp("HardSigmoid", wrt=("X",))
def hard_sigmoid(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of HardSigmoid: ct * alpha strictly between the kinks, 0 at and beyond them, as in PyTorch."""
    inside = op.And(_positive(op, n.out.Y), op.Less(n.out.Y, 1.0))
    return _where(op, n, inside, op.Mul(ct, n.attr("alpha")))


@vjp("HardSwish", wrt=("X",))
def hard_swish(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of HardSwish: ct * (x / 3 + 1/2) for -3 < x < 3; 0 for x <= -3 and ct for x >= 3, as in PyTorch."""
    if n.is_mixed(n.out.Y):
        inside = op.And(op.Greater(n.X, -3.0), op.Less(n.X, 3.0))
        above, inside = (op.Cast(mask, to=ct.dtype) for mask in (op.GreaterOrEqual(n.X, 3.0), inside))
        return op.Mul(ct, op.Add(op.Mul(inside, op.Add(op.Div(n.X, 3.0), 0.5)), above))
    # The derivative of x (x/6 + 1/2).
    middle = op.Mul(ct, op.Add(op.Div(n.X, 3.0), 0.5))
    left = op.Where(op.Greater(n.X, -3.0), middle, 0.0)
    return op.Where(op.Less(n.X, 3.0), left, ct)


# At the threshold, the output and the gradient are zero, as in PyTorch.
defvjp("ThresholdedRelu", X=lambda op, n, ct: _where(op, n, op.Greater(n.X, n.attr("alpha")), ct))


@vjp("Shrink", wrt=("input",))
def shrink(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Shrink: ct outside [-lambd, lambd], 0 inside and at the bounds, as in PyTorch."""
    outside = op.Or(op.Less(n.input, -n.attr("lambd")), op.Greater(n.input, n.attr("lambd")))
    return _where(op, n, outside, ct)


@vjp("Gelu", wrt=("X",))
def gelu(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Gelu: calls GeluGradient, or GeluTanhGradient if `approximate` is "tanh".

    Both are composite ops with native kernels.
    """
    gradient = gelu_tanh_gradient if n.attr("approximate") == "tanh" else gelu_gradient
    return op.call(gradient, n.X, ct)


defvjp("Mish", X=lambda op, n, ct: op.call(mish_gradient, n.X, ct))


@composite_vjp(silu, ("y",), wrt=("x",))
def _silu(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of SiLU, y = x sigmoid(x)."""
    return op.call(silu_gradient, n.x, ct)


@composite_vjp(hardtanh, ("y",), wrt=("x",))
def _hardtanh(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Hardtanh, y = min(max(x, low), high): ct strictly between the bounds, else 0."""
    gradient = hardtanh_gradient_of_finite if n.is_mixed(n.out.y) else hardtanh_gradient
    return op.call(gradient, n.out.y, n.low, n.high, ct)


@composite_vjp(with_slope, ("result",), broadcasts=True)
def _with_slope(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of `with_slope`, whose derivative is an input: ct_x = ct * slope."""
    return {"x": op.Mul(ct, n.slope)}


@composite_vjp(with_slopes, ("result",), broadcasts=True)
def _with_slopes(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of `with_slopes`, whose derivatives are inputs: ct_a = ct * slope_a, ct_b = ct * slope_b."""
    return {
        "a": op.Mul(ct, n.slope_a) if n.needs("a") else None,
        "b": op.Mul(ct, n.slope_b) if n.needs("b") else None,
    }


@composite_vjp(safe_softmax, ("y",), wrt=("x",))
def _safe_softmax(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of `safe_softmax`, the Softmax with zeros for fully masked rows: ct_x = y * (ct - sum(ct * y)).

    The formula is the same as for Softmax; in rows where y is zero, the cotangent is zero.
    """
    return op.call(softmax_gradient, n.out.y, ct, axis=n.attr("axis"))


@vjp("Swish", wrt=("X",))
def swish(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Swish, y = x s with s = sigmoid(alpha x): ct * (s + alpha y (1 - s))."""
    alpha = n.attr("alpha")
    sigmoid = op.Sigmoid(n.X if alpha == 1 else op.Mul(n.X, alpha))
    slope = op.Mul(n.out.Y, op.Sub(1.0, sigmoid))
    return op.Mul(ct, op.Add(sigmoid, slope if alpha == 1 else op.Mul(slope, alpha)))


@vjp("Softmax", wrt=("input",))
def softmax(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of Softmax: ct_x = y * (ct - sum(ct * y)).

    If a row of x is all -inf, the row of y is NaN. If the model replaces these NaNs, the rule uses y = 0 for this row,
    so that ct_x is zero.
    """
    y = n.out.output
    # The model's Where gives the replaced elements a cotangent of 0, but 0 * NaN is NaN: one fully masked row would
    # make all gradients NaN.
    if _is_replaced(y):
        y = op.Where(op.IsNaN(y), 0.0, y)
    return op.call(softmax_gradient, y, ct, axis=n.attr("axis"))


def _is_replaced(value: ir.Value) -> bool:
    """True if the model replaces elements of a value with a Where, as Attention's body does for fully masked rows."""
    for node, index in value.uses():
        if node.op_type == "IsNaN" or (node.op_type == "Where" and index > 0):
            return True
        if node.op_type in ("Cast", "CastLike", "Identity") and not index and _is_replaced(node.outputs[0]):
            return True
    return False


defvjp(
    "LogSoftmax", input=lambda op, n, ct: op.call(log_softmax_gradient, n.out.output, ct, axis=n.attr("axis"))
)
nondifferentiable("Hardmax", reason="piecewise constant: its derivative is zero almost everywhere")
