"""Decomposes quantized ops into standard ops: dequantize, compute in floating point, quantize again.

With `straight_through=True`, gradients pass through the rounding. The weights are integers and are not trained. ONNX
Runtime's kernels multiply integers instead; both round only once, so results differ by at most one quantization step.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.autodiff._bodies import defbody
from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import not_yet
from onnxtrain.autodiff.rules.contrib._shared import CONV, MS, channels_first, channels_last, unsupported
from onnxtrain.autodiff.rules.contrib.attention import attention_of
from onnxtrain.emitter import Emitter

not_yet(
    "QEmbedLayerNormalization",
    reason="it multiplies integers; train the model before it is quantized",
    domain=MS,
)


def _dequantize(
    op: Emitter, q: ir.Value, scale: ir.Value, zero: ir.Value | None = None, axis: int | None = None
) -> ir.Value:
    """Dequantizes integers; `axis` is the axis along which a vector of scales varies."""
    return op.DequantizeLinear(q, scale, *([zero] if zero is not None else []), axis=axis)


def _quantize(op: Emitter, y: ir.Value, scale: ir.Value, zero: ir.Value | None, like: ir.Value) -> ir.Value:
    """Quantizes y to the dtype of its zero point `zero`, or to the dtype of `like` if `zero` is None."""
    return op.QuantizeLinear(y, scale, zero if zero is not None else op.CastLike(op.const(0), like))


@defbody("QuantizeLinear", MS, "x y_scale y_zero_point", "y", axis=None)
def quantize_linear(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes com.microsoft's QuantizeLinear into the standard op."""
    zero = [n.y_zero_point] if n.y_zero_point is not None else []
    return op.QuantizeLinear(n.x, n.y_scale, *zero, axis=n.attr("axis"))


@defbody("DequantizeLinear", MS, "x x_scale x_zero_point", "y", axis=None)
def dequantize_linear(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes com.microsoft's DequantizeLinear into the standard op."""
    return _dequantize(op, n.x, n.x_scale, n.x_zero_point, n.attr("axis"))


@defbody("QLinearMatMul", "", "a a_scale a_zero_point b b_scale b_zero_point y_scale y_zero_point", "y")
def qlinear_matmul(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes QLinearMatMul: y = a·b, with one scale per row of a and per column of b, or one per tensor."""
    a = _dequantize(op, n.a, n.a_scale, n.a_zero_point, -2)
    y = op.MatMul(a, _dequantize(op, n.b, n.b_scale, n.b_zero_point, -1))
    return _quantize(op, y, n.y_scale, n.y_zero_point, n.a)


_QCONV = "x x_scale x_zero_point w w_scale w_zero_point y_scale y_zero_point B"


@defbody("QLinearConv", "", _QCONV, "y", **CONV)
def qlinear_conv(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes QLinearConv: y = Conv(x, w, B) of quantized tensors."""
    return _qlinear_conv(op, n)


def _qlinear_conv(op: Emitter, n: NodeView, *, last: bool = False) -> ir.Value:
    """Emits DequantizeLinear -> Conv -> QuantizeLinear.

    The weight has one scale per output channel or one per tensor; the bias scale is x_scale·w_scale.

    Args:
        op: emitter.
        n: the node.
        last: True for channels-last images. Weights have Conv's layout in both cases.
    """
    x = _dequantize(op, n.x, n.x_scale, n.x_zero_point)
    x = channels_first(op, x, n.rank(n.x)) if last else x
    w = _dequantize(op, n.w, n.w_scale, n.w_zero_point, 0)
    bias = [] if n.B is None else [_rescale(op, n.B, n.x_scale, n.w_scale)]
    y = op.Conv(x, w, *bias, **{name: n.attr(name) for name in CONV})
    y = channels_last(op, y, n.rank(n.x)) if last else y
    return _quantize(op, y, n.y_scale, n.y_zero_point, n.x)


def _rescale(op: Emitter, integers: ir.Value, *scales: ir.Value) -> ir.Value:
    """Returns integers times scales, in float32."""
    value = op.Cast(integers, to=ir.DataType.FLOAT)
    for scale in scales:
        value = op.Mul(value, scale)
    return value


@defbody("QLinearConv", MS, _QCONV, "y", channels_last=0, **CONV)
def contrib_qlinear_conv(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes com.microsoft's QLinearConv: like the standard op, but images may be channels-last."""
    return _qlinear_conv(op, n, last=bool(n.attr("channels_last")))


@defbody("DynamicQuantizeMatMul", MS, "A B b_scale b_zero_point bias", "Y")
def dynamic_quantize_matmul(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes DynamicQuantizeMatMul: Y = A·B + bias, with A dynamically quantized."""
    q, scale, zero = op.DynamicQuantizeLinear(n.A, _outputs=3)
    a = _dequantize(op, q, scale, zero)
    y = op.MatMul(a, _dequantize(op, n.B, n.b_scale, n.b_zero_point, -1))
    return y if n.bias is None else op.Add(y, n.bias)


@defbody(
    "DynamicQuantizeLSTM", MS,
    "X W R B sequence_lens initial_h initial_c P W_scale W_zero_point R_scale R_zero_point", "Y Y_h Y_c",
    activation_alpha=None, activation_beta=None, activations=None, clip=None, direction="forward",
    hidden_size=None, input_forget=0,
)  # fmt: skip
def dynamic_quantize_lstm(op: Emitter, n: NodeView) -> tuple[ir.Value, ...]:
    """Decomposes DynamicQuantizeLSTM: an LSTM with X dynamically quantized."""
    # The kernel also quantizes the hidden state at each time step, which no standard op can do: that rounding is left
    # out.
    q, scale, zero = op.DynamicQuantizeLinear(n.X, _outputs=3)
    weights = [
        op.Transpose(_by_direction(op, n, *quantized), perm=[0, 2, 1])
        for quantized in ((n.W, n.W_scale, n.W_zero_point), (n.R, n.R_scale, n.R_zero_point))
    ]
    others = (n.B, n.sequence_lens, n.initial_h, n.initial_c, n.P)
    names = (
        "activation_alpha",
        "activation_beta",
        "activations",
        "clip",
        "direction",
        "hidden_size",
        "input_forget",
    )
    attributes = {name: n.attr(name) for name in names}
    return op.LSTM(_dequantize(op, q, scale, zero), *weights, *others, **attributes, _outputs=3)


def _by_direction(op: Emitter, n: NodeView, q: ir.Value, scale: ir.Value, zero: ir.Value | None) -> ir.Value:
    """Dequantizes weights [directions, in, out] with one scale per direction, or one per direction and output."""
    axes = [1, 2] if n.rank(scale) == 1 else [1]
    value = op.Cast(q, to=scale.dtype)
    if zero is not None:
        value = op.Sub(value, op.Unsqueeze(op.Cast(zero, to=scale.dtype), axes))
    result: ir.Value = op.Mul(value, op.Unsqueeze(scale, axes))
    return result


@defbody("MatMulIntegerToFloat", MS, "A B a_scale b_scale a_zero_point b_zero_point bias", "Y")
def matmul_integer_to_float(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes MatMulIntegerToFloat: Y = A·B + bias, for quantized A and B."""
    a = _dequantize(op, n.A, n.a_scale, n.a_zero_point, -1)
    y = op.MatMul(a, _dequantize(op, n.B, n.b_scale, n.b_zero_point, -1))
    return y if n.bias is None else op.Add(y, n.bias)


@defbody(
    "QGemm", MS, "A a_scale a_zero_point B b_scale b_zero_point C y_scale y_zero_point", "Y",
    alpha=1.0, transA=0, transB=0,
)  # fmt: skip
def qgemm(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes QGemm: Y = alpha·A·B + C; the scale of C is alpha·a_scale·b_scale."""
    a = _dequantize(op, n.A, n.a_scale, n.a_zero_point)
    # One scale per column of the product; with transB, that is a row of B.
    b = _dequantize(op, n.B, n.b_scale, n.b_zero_point, 0 if n.attr("transB") else 1)
    y = op.Gemm(a, b, **{name: n.attr(name) for name in ("alpha", "transA", "transB")})
    if n.C is not None:
        y = op.Add(y, op.Mul(_rescale(op, n.C, n.a_scale, n.b_scale), n.attr("alpha")))
    # Without y_scale, the output is floating point.
    return y if n.y_scale is None else _quantize(op, y, n.y_scale, n.y_zero_point, n.A)


def _unary(
    name: str, compute: Callable[[Emitter, NodeView, ir.Value], ir.Value], **attributes: object
) -> None:
    """Registers the body of an op with one quantized input; `compute` maps (op, node, dequantized X) to the result."""

    @defbody(name, MS, "X X_scale X_zero_point Y_scale Y_zero_point", "Y", **attributes)
    def body(op: Emitter, n: NodeView) -> ir.Value:
        y = compute(op, n, _dequantize(op, n.X, n.X_scale, n.X_zero_point))
        return _quantize(op, y, n.Y_scale, n.Y_zero_point, n.X)


def _softmax(op: Emitter, n: NodeView, x: ir.Value) -> ir.Value:
    axis = n.attr("axis")
    # Before opset 13, Softmax flattened all axes from `axis` on.
    if n.attr("opset") is not None and n.attr("opset") < 13 and axis not in (-1, n.rank(n.X) - 1):
        raise unsupported(n, "softmax over several axes")
    y: ir.Value = op.Softmax(x, axis=axis)
    return y


def _pooled(op: Emitter, n: NodeView, x: ir.Value, pool: Callable[[ir.Value], ir.Value]) -> ir.Value:
    """Applies a channels-first pooling to images; transposes them if the node is channels-last."""
    if not n.attr("channels_last"):
        return pool(x)
    rank = n.rank(n.X)
    return channels_last(op, pool(channels_first(op, x, rank)), rank)


_POOL = {
    "auto_pad": "NOTSET",
    "ceil_mode": 0,
    "count_include_pad": 0,
    "kernel_shape": None,
    "pads": None,
    "strides": None,
}
_unary("QLinearSigmoid", lambda op, n, x: op.Sigmoid(x))
_unary("QLinearLeakyRelu", lambda op, n, x: op.LeakyRelu(x, alpha=n.attr("alpha")), alpha=0.01)
_unary("QLinearSoftmax", _softmax, axis=-1, opset=None)
_unary(
    "QLinearAveragePool",
    lambda op, n, x: _pooled(op, n, x, lambda y: op.AveragePool(y, **{name: n.attr(name) for name in _POOL})),
    channels_last=0,
    **_POOL,
)
_unary("QLinearGlobalAveragePool", lambda op, n, x: _pooled(op, n, x, op.GlobalAveragePool), channels_last=0)


def _binary(name: str) -> None:
    """Registers the body of an op with two quantized inputs, e.g. "QLinearAdd"."""

    @defbody(name, MS, "A A_scale A_zero_point B B_scale B_zero_point C_scale C_zero_point", "C")
    def body(op: Emitter, n: NodeView) -> ir.Value:
        a, b = (
            _dequantize(op, n.A, n.A_scale, n.A_zero_point),
            _dequantize(op, n.B, n.B_scale, n.B_zero_point),
        )
        y = op.emit(name.removeprefix("QLinear"), a, b)
        return _quantize(op, y, n.C_scale, n.C_zero_point, n.A)


_binary("QLinearAdd")
_binary("QLinearMul")


@defbody("QLinearConcat", MS, "Y_scale Y_zero_point inputs", "Y", axis=None)
def qlinear_concat(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes QLinearConcat: concatenates tensors, each of which has its own scale and zero point."""
    triples = n.inputs[2:]
    parts = [op.DequantizeLinear(*triples[k : k + 3]) for k in range(0, len(triples), 3)]
    return op.QuantizeLinear(op.Concat(*parts, axis=n.attr("axis")), n.Y_scale, n.Y_zero_point)


@defbody(
    "QAttention", MS,
    "input weight bias input_scale weight_scale mask_index input_zero_point weight_zero_point past", "output present",
    do_rotary=0, mask_filter_value=-10000.0, num_heads=None, past_present_share_buffer=0, scale=None, unidirectional=0,
)  # fmt: skip
def qattention(op: Emitter, n: NodeView) -> list[ir.Value]:
    """Decomposes QAttention: self-attention of a quantized input with quantized weights."""
    if n.attr("do_rotary"):
        raise unsupported(n, "rotary embeddings")
    x = _dequantize(op, n.input, n.input_scale, n.input_zero_point)
    weights = _dequantize(op, n.weight, n.weight_scale, n.weight_zero_point, -1)
    return attention_of(op, n, op.Add(op.MatMul(x, weights), n.bias), [])
