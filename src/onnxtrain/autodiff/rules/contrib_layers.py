"""Layers of onnxruntime's domain com.microsoft, in standard ops; see :mod:`onnxtrain.autodiff.rules.contrib`."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView, Signature
from onnxtrain.autodiff._registry import defbody, not_yet, vjp
from onnxtrain.autodiff.rules._contrib import CONV, MS, channels_first, channels_last, refused
from onnxtrain.autodiff.rules.contrib import fused_convolution, group_normalized, matrix_product
from onnxtrain.emitter import Emitter

not_yet(
    *("BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch"),
    reason="its result is made of the tokens that were chosen, which have no gradient; train the decoder that it calls",
    domain=MS,
)


@defbody("TransposeMatMul", MS, "A B", "Y", alpha=1.0, transA=0, transB=0)
def transpose_matmul(op: Emitter, n: NodeView) -> ir.Value:
    """alpha·op(A)·op(B)."""
    return matrix_product(op, n, (n.attr("transA"), 0), (n.attr("transB"), 0))


@defbody("BiasAdd", MS, "X bias skip", "Y")
def bias_add(op: Emitter, n: NodeView) -> ir.Value:
    """A sum of three."""
    return op.Add(op.Add(n.X, n.bias), n.skip)


@defbody("NhwcConv", MS, "X W B", "Y", **CONV)
def nhwc_conv(op: Emitter, n: NodeView) -> ir.Value:
    """A Conv whose images, and weights, have their channels last."""
    given = {name: n.attr(name) for name in CONV}
    rank = n.rank(n.X)
    y = op.Conv(channels_first(op, n.X, rank), channels_first(op, n.W, rank), n.B, **given)
    return channels_last(op, y, rank)


@defbody("NhwcFusedConv", MS, "X W B Z", "Y", activation="", activation_params=None, **CONV)
def nhwc_fused_conv(op: Emitter, n: NodeView) -> ir.Value:
    """A FusedConv whose images have their channels last, and whose weights have not."""
    rank = n.rank(n.X)
    z = None if n.Z is None else channels_first(op, n.Z, rank)
    return channels_last(op, fused_convolution(op, n, channels_first(op, n.X, rank), z), rank)


@defbody(
    "ConvTransposeWithDynamicPads", MS, "X W Pads B", "Y",
    auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None, output_padding=None, strides=None,
)  # fmt: skip
def conv_transpose_with_dynamic_pads(op: Emitter, n: NodeView) -> ir.Value:
    """A ConvTranspose without padding, from which the padding is cut off."""
    if n.attr("auto_pad") not in ("NOTSET", b"NOTSET"):
        raise refused(n, f"the padding {n.attr('auto_pad')}")
    names = ("dilations", "group", "kernel_shape", "output_padding", "strides")
    whole: ir.Value = op.ConvTranspose(n.X, n.W, n.B, **{name: n.attr(name) for name in names})
    if n.Pads is None:
        return whole
    spatial = n.rank(n.X) - 2
    begins, ends = op.Split(n.Pads, axis=0, num_outputs=2, _outputs=2)
    ends = op.Sub(op.Shape(whole, start=2), ends)
    return op.Slice(whole, begins, ends, list(range(2, 2 + spatial)))


@defbody(
    "SkipGroupNorm", MS, "X gamma beta skip bias", "Y S", activation=0, channels_last=1, epsilon=1e-5, groups=None,
)  # fmt: skip
def skip_group_norm(op: Emitter, n: NodeView) -> list[ir.Value]:
    """GroupNorm of a sum; the skip connection may be `[batch, channels]` or `[batch, 1, 1, channels]`."""
    if not n.attr("channels_last"):
        raise refused(n, "channels that are not last")
    skip = op.Unsqueeze(n.skip, [1, 2]) if n.rank(n.skip) == 2 else n.skip
    total = op.Add(n.X, skip)
    total = total if n.bias is None else op.Add(total, n.bias)
    return [group_normalized(op, n, total), total]


@defbody("Rfft", MS, "X", "Y", normalized=0, onesided=1, signal_ndim=1)
def rfft(op: Emitter, n: NodeView) -> ir.Value:
    """Half the spectrum of the last axis."""
    _check_transform(n)
    return op.DFT(op.Unsqueeze(n.X, [-1]), None, op.const(-2), onesided=1)


@defbody("Irfft", MS, "X", "Y", normalized=0, onesided=1, signal_ndim=1)
def irfft(op: Emitter, n: NodeView) -> ir.Value:
    """What has this half of a spectrum: an even number of reals."""
    _check_transform(n)
    return op.Squeeze(op.DFT(n.X, None, op.const(-2), onesided=1, inverse=1), [-1])


def _check_transform(n: NodeView) -> None:
    if n.attr("signal_ndim") != 1 or n.attr("normalized") or not n.attr("onesided"):
        raise refused(n, "transforms over several axes, normalized or of the whole spectrum")


@defbody("ComplexMul", MS, "A B", "C")
def complex_mul(op: Emitter, n: NodeView) -> ir.Value:
    """A·B; real and imaginary parts are last."""
    return _complex_product(op, n, 1.0)


@defbody("ComplexMulConj", MS, "A B", "C")
def complex_mul_conj(op: Emitter, n: NodeView) -> ir.Value:
    """A·conj(B)."""
    return _complex_product(op, n, -1.0)


def _complex_product(op: Emitter, n: NodeView, sign: float) -> ir.Value:
    a, b = ([op.Slice(value, [part], [part + 1], [-1]) for part in (0, 1)] for value in (n.A, n.B))
    b[1] = op.Mul(b[1], sign)
    real = op.Sub(op.Mul(a[0], b[0]), op.Mul(a[1], b[1]))
    imaginary = op.Add(op.Mul(a[0], b[1]), op.Mul(a[1], b[0]))
    return op.Concat(real, imaginary, axis=-1)


@vjp(
    "Inverse", wrt=("X",), domain=MS, signature=Signature(("X",), ("Y",), attributes={}),
    shapes=lambda op, n: op.Identity(n.X),
)  # fmt: skip
def inverse(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """d(X⁻¹) = -X⁻¹ dX X⁻¹: ct_X = -Yᵀ ct Yᵀ. There is no standard op for it: the kernel stays."""
    rank = n.rank(n.X)
    turned = op.Transpose(n.out.Y, perm=[*range(rank - 2), rank - 1, rank - 2])
    return op.Neg(op.MatMul(op.MatMul(turned, ct), turned))
