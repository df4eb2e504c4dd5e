"""Decomposes com.microsoft Fourier transform and complex product ops into standard ops."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff._bodies import defbody
from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff.rules.contrib._shared import MS, unsupported
from onnxtrain.emitter import Emitter


@defbody("Rfft", MS, "X", "Y", normalized=0, onesided=1, signal_ndim=1)
def rfft(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes Rfft: the one-sided spectrum of the last axis; a new last axis holds real and imaginary parts."""
    _check_transform(n)
    # DFT needs a last axis for real and imaginary parts, of size one for a real signal; -2 is then the last axis of X.
    return op.DFT(op.Unsqueeze(n.X, [-1]), None, op.const(-2), onesided=1)


@defbody("Irfft", MS, "X", "Y", normalized=0, onesided=1, signal_ndim=1)
def irfft(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes Irfft: inverts Rfft for signals of even length; the last axis of X holds real and imaginary parts."""
    _check_transform(n)
    return op.Squeeze(op.DFT(n.X, None, op.const(-2), onesided=1, inverse=1), [-1])


def _check_transform(n: NodeView) -> None:
    """Raises NoGradientRule unless the transform is one-sided, unscaled and over the last axis only."""
    if n.attr("signal_ndim") != 1 or n.attr("normalized") or not n.attr("onesided"):
        raise unsupported(n, "a transform that is two-sided, normalized, or over several axes")


@defbody("ComplexMul", MS, "A B", "C")
def complex_mul(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes ComplexMul: C = A·B, where the last axis holds real and imaginary parts."""
    return _complex_product(op, n, 1.0)


@defbody("ComplexMulConj", MS, "A B", "C")
def complex_mul_conj(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes ComplexMulConj: C = A·conj(B), where the last axis holds real and imaginary parts."""
    return _complex_product(op, n, -1.0)


def _complex_product(op: Emitter, n: NodeView, sign: float) -> ir.Value:
    """Returns A·B for sign 1, or A·conj(B) for sign -1."""
    a, b = ([op.Slice(value, [part], [part + 1], [-1]) for part in (0, 1)] for value in (n.A, n.B))
    b[1] = op.Mul(b[1], sign)
    real = op.Sub(op.Mul(a[0], b[0]), op.Mul(a[1], b[1]))
    imaginary = op.Add(op.Mul(a[0], b[1]), op.Mul(a[1], b[0]))
    return op.Concat(real, imaginary, axis=-1)
