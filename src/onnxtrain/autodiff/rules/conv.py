"""Convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import Cotangents, not_yet, vjp
from onnxtrain.autodiff.rules._windows import Windows, pad, scatter_windows, tap_slices, windows_of
from onnxtrain.emitter import Emitter

_FEW_CHANNELS = 16
"""Below this many channels per group, one product over all taps beats one per tap (measured on CPU)."""


@vjp("Conv", wrt=("X", "W", "B"))
def conv(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """Y[o] = sum_t W[t] X[o * stride + t * dilation - pad] + B: linear in X, W and B."""
    shape = n.static(n.W)
    w = windows_of(op, n, n.X, shape[2:], n.out.Y)
    group = n.attr("group")
    return {
        "X": scatter_windows(op, ct, n.W, w, n.X, group) if n.needs("X") else None,
        "W": _kernel_cotangent(op, ct, pad(op, n.X, w), w, shape, group) if n.needs("W") else None,
        "B": _sum_over_positions(op, n, ct) if n.needs("B") else None,
    }


@vjp("ConvTranspose", wrt=("X", "W", "B"))
def conv_transpose(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """The adjoint of Conv in X: its own adjoint in X is Conv, and for W the parts of X and Y are swapped."""
    shape = n.static(n.W)
    w = _transposed_windows(n, shape[2:])
    group = n.attr("group")
    padded = pad(op, ct, w) if n.needs("X") or n.needs("W") else ct
    # As many windows as X has positions: runtimes refuse output_padding of a stride or more.
    attributes = {"strides": w.strides, "dilations": w.dilations, "group": group, "kernel_shape": w.kernel}
    return {
        "X": op.Conv(padded, n.W, **attributes) if n.needs("X") else None,
        "W": _kernel_cotangent(op, n.X, padded, w, shape, group) if n.needs("W") else None,
        "B": _sum_over_positions(op, n, ct) if n.needs("B") else None,
    }


def _transposed_windows(n: NodeView, kernel: Sequence[int]) -> Windows:
    """The windows of a ConvTranspose, which slide over its output; pads as the schema derives them."""
    rank = len(kernel)
    strides = tuple(n.attr("strides") or [1] * rank)
    dilations = tuple(n.attr("dilations") or [1] * rank)
    extra = n.attr("output_padding") or [0] * rank
    wanted = n.attr("output_shape")
    pads = tuple(n.attr("pads") or [0] * 2 * rank)
    same = n.attr("auto_pad") in ("SAME_UPPER", "SAME_LOWER")
    w = Windows(tuple(kernel), strides, dilations, pads[:rank], pads[rank:])
    if wanted is None and not same:
        return w
    if wanted is None:  # output = input * stride
        totals = [p + e - s for p, e, s in zip(extra, w.extents, strides, strict=True)]
    else:
        sizes = n.static(n.X, range(2, 2 + rank))
        totals = [
            s * (size - 1) + p + e - out
            for s, size, p, e, out in zip(strides, sizes, extra, w.extents, wanted[-rank:], strict=True)
        ]
    small = tuple(max(t, 0) // 2 for t in totals)
    large = tuple(max(t, 0) - s for t, s in zip(totals, small, strict=True))
    begins, ends = (small, large) if n.attr("auto_pad") == "SAME_UPPER" else (large, small)
    return Windows(w.kernel, strides, dilations, begins, ends)


def _kernel_cotangent(
    op: Emitter, windowed: ir.Value, padded: ir.Value, w: Windows, shape: Sequence[int], group: int
) -> ir.Value:
    """Returns dW[m, c, t] = sum_(batch, o) windowed[m, o] * padded[c, o * stride + t * dilation].

    As matrix products over slices of the padded value: faster on CPU than Conv of transposed operands.

    Args:
        op: emitter.
        windowed: `[batch, M, *counts]`.
        padded: `[batch, C, *spatial]`, padding included.
        w: the windows.
        shape: of the result, `[M, C / group, *kernel]`.
        group: number of groups of channels; row m sees the channels of its group only.
    """
    rows, columns, taps = shape[0] // group, shape[1], w.kernel
    if rows == columns == 1:
        axes = [0, *range(2, 2 + len(taps))]
        slices = tap_slices(op, padded, w)
        sums = [op.ReduceSum(op.Mul(windowed, x), axes, keepdims=0) for x in slices]
        result = op.Transpose(op.Reshape(_concat(op, sums, 0), [-1, shape[0]]), perm=[1, 0])
        return op.Reshape(result, list(shape))  # type: ignore[no-any-return]
    left = _as_matrices(op, windowed, rows, group)
    slices = tap_slices(op, _split_groups(op, padded, columns, group), w)
    if columns < _FEW_CHANNELS:
        blocks = [_flat(op, _concat(op, list(slices), 1))]
    else:
        blocks = [_flat(op, x) for x in slices]
    products = _concat(op, [op.MatMul(left, op.Transpose(b, perm=[0, 2, 1])) for b in blocks], 2)
    result = op.ReduceSum(op.Reshape(products, [-1, shape[0], math.prod(taps) * columns]), [0], keepdims=0)
    result = op.Reshape(result, [shape[0], *taps, columns])
    rank = len(shape)
    return op.Transpose(result, perm=[0, rank - 1, *range(1, rank - 1)])  # type: ignore[no-any-return]


def _split_groups(op: Emitter, value: ir.Value, channels: int, group: int) -> ir.Value:
    """Returns `[batch, group * channels, *spatial]` as `[batch * group, channels, *spatial]`."""
    if group == 1:
        return value
    return op.Reshape(value, op.Concat([-1, channels], op.Shape(value, start=2), axis=0))  # type: ignore[no-any-return]


def _as_matrices(op: Emitter, value: ir.Value, channels: int, group: int) -> ir.Value:
    """Returns `[batch, group * channels, *spatial]` as `[batch * group, channels, positions]`."""
    return _flat(op, _split_groups(op, value, channels, group))


def _flat(op: Emitter, value: ir.Value) -> ir.Value:
    return op.Reshape(value, [0, 0, -1])  # type: ignore[no-any-return]


def _concat(op: Emitter, values: list[ir.Value], axis: int) -> ir.Value:
    return op.Concat(*values, axis=axis) if len(values) > 1 else values[0]


def _sum_over_positions(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """Sums over every axis but the channels."""
    return op.ReduceSum(ct, [0, *range(2, n.rank(n.X))], keepdims=0)  # type: ignore[no-any-return]


not_yet("DeformConv", reason="its sampling positions are data; no user has asked for it")
