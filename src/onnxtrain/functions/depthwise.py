"""Depthwise convolutions of small planes, and their gradients, as one matrix product per channel.

With few positions, each channel of a convolution is a product of its positions, one row per sample, with a matrix of
taps: y[c, n, o] = sum_i x[c, n, i] T[c, i, o]. T[c, i, o] is the tap with which window o reads position i, or 0.
T = weight · M with constant masks M[t, i, o], which are 1 if window o reads position i with tap t.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtrain.emitter import AttributeRef, Emitter, static_dims

from ._specialized import SpecializedOp

_MOST_PAIRS = 64 * 64
"""Up to this many pairs of a position and a window, ONNX Runtime (CPU) takes a tenth to a half of the time of Conv."""

_MOST_ENTRIES = 2**20
"""Maximum size of T, so that it needs little memory beside the activations."""


@dataclass(frozen=True)
class DepthwisePlanes:
    """Geometry of a depthwise convolution of small planes, with one entry per spatial axis.

    Attributes:
        kernel: number of taps.
        strides: distance between windows.
        dilations: distance between taps.
        begins: padding at the beginning.
        sizes: sizes of the input.
        counts: number of windows.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    sizes: tuple[int, ...]
    counts: tuple[int, ...]

    @staticmethod
    def of(
        x: ir.Value, y: ir.Value, weight: Sequence[int | None], geometry: Mapping[str, Sequence[int]]
    ) -> DepthwisePlanes | None:
        """Returns the geometry of a convolution, or None if it is not depthwise or matrix products are slower.

        Args:
            x: the input, `[batch, channels, *spatial]`.
            y: the output.
            weight: shape of the weight.
            geometry: the attributes `strides`, `dilations` and `pads`, and `group` as a list of one number.
        """
        of_x, of_y = static_dims(x), static_dims(y)
        if of_x is None or of_y is None or len(of_x) != len(weight) or len(of_y) != len(weight):
            return None
        kernel = tuple(size or 0 for size in weight[2:])
        sizes, counts = (tuple(size or 0 for size in dims[2:]) for dims in (of_x, of_y))
        (group,), pairs = geometry["group"], math.prod((*sizes, *counts))
        # A 0 is an unknown size, or an empty plane.
        if list(weight[:2]) != [group, 1] or math.prod(kernel) <= 1:
            return None
        if not 0 < pairs <= _MOST_PAIRS or pairs * group > _MOST_ENTRIES:
            return None
        strides, dilations, begins = (
            tuple(geometry[name][: len(kernel)]) for name in ("strides", "dilations", "pads")
        )
        return DepthwisePlanes(kernel, strides, dilations, begins, sizes, counts)

    def output(self, op: Emitter, x: ir.Value, weight: ir.Value) -> ir.Value:
        """Returns the convolution of x, `[batch, channels, *counts]`. weight: `[channels, 1, *kernel]`."""
        return self._product(op, x, weight, self.sizes, self.counts)

    def input_cotangent(self, op: Emitter, ct: ir.Value, weight: ir.Value) -> ir.Value:
        """Returns the cotangent of the input, given the output's, `[batch, channels, *counts]`."""
        return self._product(op, ct, weight, self.counts, self.sizes)

    def weight_cotangent(self, op: Emitter, ct: ir.Value, x: ir.Value) -> ir.Value:
        """Returns the cotangent of the weight, `[channels, taps]`, given the output's and the input."""
        pairs = math.prod(self.sizes) * math.prod(self.counts)
        columns = op.Transpose(_by_channel(op, x, self.sizes), perm=[0, 2, 1])
        # [channels, positions, windows]: the cotangent of T.
        sums = op.Reshape(op.MatMul(columns, _by_channel(op, ct, self.counts)), [-1, pairs])
        masks = op.Reshape(self._masks(op, x, turned=False), [-1, pairs])
        return op.MatMul(sums, op.Transpose(masks, perm=[1, 0]))

    def _product(
        self, op: Emitter, rows: ir.Value, weight: ir.Value, given: Sequence[int], wanted: Sequence[int]
    ) -> ir.Value:
        """Returns the product of `rows`, planes of the sizes `given`, with T or its transpose."""
        taps = math.prod(self.kernel)
        masks = op.Reshape(self._masks(op, rows, turned=given is self.counts), [taps, -1])
        matrices = op.MatMul(op.Reshape(weight, [-1, taps]), masks)
        matrices = op.Reshape(matrices, [-1, math.prod(given), math.prod(wanted)])
        product = op.Transpose(op.MatMul(_by_channel(op, rows, given), matrices), perm=[1, 0, 2])
        return op.Reshape(product, [0, 0, *wanted])

    def _masks(self, op: Emitter, like: ir.Value, *, turned: bool) -> ir.Value:
        """Returns the masks M, `[taps, positions, windows]`, or `[taps, windows, positions]` if `turned`.

        The mask of a tap is the product of its masks along all axes, so that only those are constants of the model.
        """
        masks, shape = None, [1, 1, 1]
        for axis in range(len(self.kernel)):
            mask = self._mask_of(axis)
            mask = mask.swapaxes(1, 2) if turned else mask
            along = op.const(mask, like=like)
            if masks is not None:
                taps, rows, columns = mask.shape
                wide = op.Reshape(masks, [shape[0], 1, shape[1], 1, shape[2], 1])
                along = op.Mul(wide, op.Reshape(along, [1, taps, 1, rows, 1, columns]))
            shape = [size * more for size, more in zip(shape, mask.shape, strict=True)]
            masks = op.Reshape(along, shape)
        assert masks is not None
        return masks

    def _mask_of(self, axis: int) -> np.ndarray:
        """Returns, for one axis, 1 where window o reads position i with tap t, `[taps, positions, windows]`."""
        tap, position, window = np.ogrid[: self.kernel[axis], : self.sizes[axis], : self.counts[axis]]
        read = window * self.strides[axis] + tap * self.dilations[axis] - self.begins[axis]
        return np.asarray(read == position, np.float64)


def _by_channel(op: Emitter, value: ir.Value, sizes: Sequence[int]) -> ir.Value:
    """Returns a value, `[batch, channels, *sizes]`, as `[channels, batch, positions]`."""
    return op.Transpose(op.Reshape(value, [0, 0, math.prod(sizes)]), perm=[1, 0, 2])


def depthwise_convolution(planes: DepthwisePlanes, *, bias: bool) -> SpecializedOp:
    """Returns the op that computes a depthwise Conv of small planes. Calls must set all attributes of Conv's geometry.

    Args:
        planes: the geometry.
        bias: whether the third input, `[channels]`, is given.
    """

    def body(op: Emitter, x: ir.Value, w: ir.Value, b: ir.Value, **_: AttributeRef) -> ir.Value:
        y = planes.output(op, x, w)
        return op.Add(y, op.Reshape(b, [-1] + [1] * len(planes.kernel))) if bias else y

    attributes = dict.fromkeys(("strides", "dilations", "pads"), ir.AttributeType.INTS)
    return SpecializedOp(
        "DepthwiseConvolution",
        dict.fromkeys(("x", "w", "b")),
        attributes | {"group": ir.AttributeType.INT},
        1,
        f"{planes} {bias}",
        body,
    )
