"""Differentiates Fourier transforms of `[..., length, ..., 1 or 2]`; the last axis holds real and imaginary parts."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import Cotangents, nondifferentiable, vjp
from onnxtrain.autodiff.rules._scatter import scatter_nd
from onnxtrain.emitter import Emitter, static_dims

nondifferentiable(
    "BlackmanWindow",
    "HammingWindow",
    "HannWindow",
    "MelWeightMatrix",
    reason="a table that depends only on an integer size",
)


@vjp("DFT", wrt=("input",))
def dft(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of DFT: applies the adjoint transform to the cotangent.

    The forward transform y_k = sum_n w^kn x_n, w = exp(-2πi/L), has the adjoint sum_k w^-kn ct_k. The adjoint of the
    inverse transform is the forward transform divided by L. If the inverse transform computes a real signal from a
    one-sided spectrum, the cotangents of all entries are doubled, except for the zero frequency and, if L is even, the
    Nyquist frequency. The cotangent is 0 for elements that were cropped to `dft_length`, and has no entries for
    zero padding or for the imaginary part of a real input.
    """
    if not n.attr("inverse"):
        length = _size(op, n, n.input) if n.dft_length is None else _length(op, n.dft_length)
        along = op.Cast(_is_axis(op, n), to=ir.DataType.INT64) if n.attr("onesided") else None
        adjoint = _transform_adjoint(op, ct, length, _axis(op, n), along)
    else:
        length = _size(op, n, n.out.output)
        adjoint = op.DFT(ct, None, _axis(op, n), onesided=n.attr("onesided"))
        adjoint = op.Div(adjoint, op.Cast(length, to=ct.dtype))
        if n.attr("onesided"):
            adjoint = op.Mul(adjoint, _counts_in_spectrum(op, n, length, ct))
    return _with_input_shape(op, n, adjoint)


def _transform_adjoint(
    op: Emitter, ct: ir.Value, length: ir.Value, axis: ir.Value, along: ir.Value | None
) -> ir.Value:
    """Applies the adjoint of a forward transform to a cotangent.

    Args:
        op: emitter.
        ct: cotangent of the spectrum.
        length: length of the transform, int64 [1].
        axis: axis of the transform, int64.
        along: for a one-sided spectrum, a mask, int64 [rank], that is 1 for the axis of the transform; otherwise None.
    """
    if along is not None:
        # The other half of the spectrum is padded with zeros by Pad instead of `dft_length`: with the latter, ONNX
        # Runtime (1.32) keeps using the previous value of a symbolic size.
        rest = op.Sub(length, op.Add(op.Div(length, [2]), [1]))
        ct = op.Pad(ct, op.Concat(op.Mul(along, [0]), op.Mul(along, rest), axis=0))
    # Conjugate, transform, conjugate: not L times the inverse transform, because ONNX Runtime (1.32) divides a float64
    # inverse by L in float32.
    signs = op.const([1.0, -1.0], like=ct)
    return op.Mul(op.DFT(op.Mul(ct, signs), None, axis), signs)


def _counts_in_spectrum(op: Emitter, n: NodeView, length: ir.Value, like: ir.Value) -> ir.Value:
    """Returns how often each entry of a one-sided spectrum occurs in the full spectrum: once or twice."""
    half = op.Div(length, [2])
    place = op.Range(0, op.Reshape(op.Add(half, [1]), []), 1)
    # The zero frequency and, for an even length, the Nyquist frequency occur once.
    alone = op.Or(op.Equal(place, [0]), op.Equal(op.Mul(place, [2]), length))
    counts = op.Where(alone, op.const(1.0, like=like), op.const(2.0, like=like))
    return op.Reshape(counts, op.Where(_is_axis(op, n), [-1], [1]))


def _size(op: Emitter, n: NodeView, value: ir.Value) -> ir.Value:
    """Returns the size of a value along the axis of the transform, int64 [1]."""
    number = n.constant(_axis(op, n))
    if number is not None:
        return op.dim(value, int(number))
    return op.Gather(op.shape_of(value), op.Reshape(_axis(op, n), [1]))


def _length(op: Emitter, length: ir.Value) -> ir.Value:
    """Casts a length, int32 or int64, to int64 [1]."""
    return op.Cast(op.Reshape(length, [1]), to=ir.DataType.INT64)


def _axis(op: Emitter, n: NodeView) -> ir.Value:
    """Returns the axis of the transform."""
    # An explicit default, because ONNX Runtime (1.32) crashes on a DFT whose axis is an empty name.
    axis = n.inputs[2] if len(n.inputs) > 2 else None
    return op.const(-2) if axis is None else axis


def _is_axis(op: Emitter, n: NodeView) -> ir.Value:
    """Returns a mask, bool [rank], that is true for the axis of the transform."""
    rank = op.Size(op.shape_of(n.input))
    return op.Equal(op.Range(0, rank, 1), op.Mod(_axis(op, n), rank))


def _with_input_shape(op: Emitter, n: NodeView, value: ir.Value) -> ir.Value:
    """Returns `value`, cropped and padded with zeros to the shape of the input."""
    dims = static_dims(n.input)
    parts = None if dims is None else dims[-1]
    if n.dft_length is None and parts == 2:
        return value
    if n.dft_length is None and parts == 1:
        return op.Slice(value, [0], [1], [-1])
    target = op.shape_of(n.input)
    starts = op.Mul(target, [0])
    cut = op.Slice(value, starts, target)
    missing = op.Sub(target, op.Shape(cut))
    return op.Pad(cut, op.Concat(starts, missing, axis=0))


@vjp("STFT", wrt=("signal", "window"))
def stft(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of STFT: multiplies the frames' cotangents by the window, and adds them up where frames overlap."""
    # PyTorch's TorchScript exporter emits a real signal as [batch, length], without the last axis, and ONNX Runtime
    # accepts it.
    flat = n.rank(n.signal) == 2
    signal = op.Unsqueeze(n.signal, [2]) if flat else n.signal
    if n.window is not None:
        length = op.dim(n.window, 0)
    else:
        length = op.dim(n.signal, 1) if n.frame_length is None else _length(op, n.frame_length)
    along = op.const([0, 0, 1, 0]) if n.attr("onesided") else None
    # Shape [batch, frames, length, 2], then without imaginary parts if the signal is real.
    frames = _transform_adjoint(op, ct, length, op.const(-2), along)
    parts = op.const([1]) if flat else op.dim(n.signal, 2)
    frames = op.Slice(frames, [0], parts, [3])
    first = op.Mul(op.Range(0, op.Reshape(op.dim(ct, 1), []), 1), op.Cast(n.frame_step, to=ir.DataType.INT64))
    # Positions in the signal, [frames, length].
    places = op.Add(op.Unsqueeze(first, [1]), op.Range(0, op.Reshape(length, []), 1))
    ct_signal = ct_window = None
    if n.needs("signal"):
        weighted = frames if n.window is None else op.Mul(frames, op.Unsqueeze(n.window, [1]))
        shape = op.Concat(op.dim(n.signal, 1), op.dim(n.signal, 0), parts, axis=0)
        updates = op.Transpose(weighted, perm=[1, 2, 0, 3])
        total = scatter_nd(op, shape, op.Unsqueeze(places, [2]), updates)
        ct_signal = op.Transpose(total, perm=[1, 0, 2])
        ct_signal = op.Squeeze(ct_signal, [2]) if flat else ct_signal
    if n.needs("window"):
        read = op.Gather(signal, places, axis=1)
        ct_window = op.ReduceSum(op.Mul(frames, read), [0, 1, 3], keepdims=0)
    return ct_signal, ct_window
