"""Depthwise convolutions of small planes as matrix products, one per channel, for their gradients.

With few positions, each channel of a convolution is a product of its positions, one row per sample, with a matrix of
taps: y[c, n, o] = sum_i x[c, n, i] T[c, i, o]. T[c, i, o] is the tap with which window o reads position i, or 0.
T = weight · M with constant masks M[t, i, o], which are 1 if window o reads position i with tap t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.rules._windows import Windows, spatial_sizes
from onnxtrain.emitter import Emitter

_MOST_PAIRS = 64 * 64
"""Up to this many pairs of a position and a window, ONNX Runtime (CPU) takes a tenth to a half of the time of Conv."""

_MOST_ENTRIES = 2**20
"""Maximum size of T, so that it needs little memory beside the activations."""


def suits_products(w: Windows, value: ir.Value, windowed: ir.Value, shape: Sequence[int], group: int) -> bool:
    """True if the planes of a depthwise convolution are so small that matrix products are faster.

    Args:
        w: the windows.
        value: the tensor that the windows slide over, `[batch, channels, *spatial]`.
        windowed: the tensor with one position per window, `[batch, channels, *counts]`.
        shape: shape of the weight.
        group: number of channel groups.
    """
    sizes = (*spatial_sizes(value), *spatial_sizes(windowed))
    if shape[0] != group or shape[1] != 1 or math.prod(w.kernel) == 1 or w.pads is None:
        return False
    if len(sizes) != 2 * len(w.kernel) or None in sizes:
        return False
    pairs = math.prod(size or 0 for size in sizes)
    return 0 < pairs <= _MOST_PAIRS and pairs * group <= _MOST_ENTRIES


def input_cotangent(op: Emitter, ct: ir.Value, weight: ir.Value, w: Windows, value: ir.Value) -> ir.Value:
    """Returns the cotangent of `value`, the input of a depthwise convolution.

    ct: `[batch, channels, *counts]`; weight: `[channels, 1, *kernel]`.
    """
    sizes, counts, taps = _sizes(value), _sizes(ct), math.prod(w.kernel)
    masks = op.Reshape(_masks(op, w, counts, sizes, ct, turned=True), [taps, -1])
    matrices = op.MatMul(op.Reshape(weight, [-1, taps]), masks)
    matrices = op.Reshape(matrices, [-1, math.prod(counts), math.prod(sizes)])
    rows = op.Transpose(op.MatMul(_by_channel(op, ct, counts), matrices), perm=[1, 0, 2])
    return op.Reshape(rows, [0, 0, *sizes])


def weight_cotangent(op: Emitter, windowed: ir.Value, value: ir.Value, w: Windows) -> ir.Value:
    """Returns the cotangent of the weight of a depthwise convolution, `[channels, taps]`."""
    sizes, counts = _sizes(value), _sizes(windowed)
    columns = op.Transpose(_by_channel(op, value, sizes), perm=[0, 2, 1])
    # [channels, positions, counts]: the cotangents of T.
    sums = op.MatMul(columns, _by_channel(op, windowed, counts))
    pairs = math.prod(sizes) * math.prod(counts)
    masks = op.Reshape(_masks(op, w, sizes, counts, value), [-1, pairs])
    return op.MatMul(op.Reshape(sums, [-1, pairs]), op.Transpose(masks, perm=[1, 0]))


def _sizes(value: ir.Value) -> list[int]:
    return [int(size or 0) for size in spatial_sizes(value)]


def _by_channel(op: Emitter, value: ir.Value, sizes: Sequence[int]) -> ir.Value:
    """Returns a value, `[batch, channels, *sizes]`, as `[channels, batch, positions]`."""
    return op.Transpose(op.Reshape(value, [0, 0, math.prod(sizes)]), perm=[1, 0, 2])


def _masks(
    op: Emitter, w: Windows, first: Sequence[int], second: Sequence[int], like: ir.Value, turned: bool = False
) -> ir.Value:
    """Returns the masks M, `[taps, positions, windows]`, or if `turned`, `[taps, windows, positions]`.

    The mask of a tap is the product of its masks along all axes, so that only those are constants of the model.

    Args:
        op: emitter.
        w: the windows; their padding is known.
        first: sizes of the value, or if `turned`, numbers of windows.
        second: numbers of windows, or if `turned`, sizes of the value.
        like: has the dtype of the result.
        turned: if true, exchanges positions and windows.
    """
    masks, shape = None, [1, 1, 1]
    for axis, (taps, rows, columns) in enumerate(zip(w.kernel, first, second, strict=True)):
        mask = _axis_mask(w, axis, *((columns, rows) if turned else (rows, columns)))
        along = op.const(mask.swapaxes(1, 2) if turned else mask, like=like)
        if masks is not None:
            wide = op.Reshape(masks, [shape[0], 1, shape[1], 1, shape[2], 1])
            along = op.Mul(wide, op.Reshape(along, [1, taps, 1, rows, 1, columns]))
        shape = [shape[0] * taps, shape[1] * rows, shape[2] * columns]
        masks = op.Reshape(along, shape)
    assert masks is not None
    return masks


def _axis_mask(w: Windows, axis: int, size: int, count: int) -> np.ndarray:
    """Returns, for one axis, 1 where window o reads position i with tap t, `[taps, positions, windows]`."""
    assert isinstance(w.begins, tuple)
    tap, position, window = np.ogrid[: w.kernel[axis], :size, :count]
    read = window * w.strides[axis] + tap * w.dilations[axis] - w.begins[axis]
    return np.asarray(read == position, np.float64)
