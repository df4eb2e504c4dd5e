"""Describes sliding windows over the spatial axes of `[batch, channels, *spatial]`, for convolution and pooling.

Tap `t` of window `o` reads position `o * stride + t * dilation - pad_begin` of the input.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.emitter import Emitter, static_dims

Sizes = tuple[int, ...] | ir.Value
"""One size per spatial axis: integers, or an int64 tensor if known only at run time."""

_END = np.iinfo(np.int64).max
"""End of a Slice that extends to the end of the axis."""


@dataclass(frozen=True)
class Windows:
    """Geometry of sliding windows, with one entry per spatial axis.

    Attributes:
        kernel: number of taps, e.g. (3, 3).
        strides: distance between windows, as in the schema.
        dilations: distance between taps, as in the schema.
        begins: padding at the beginning of each axis.
        ends: padding at the end of each axis.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: Sizes
    ends: Sizes

    @property
    def extents(self) -> tuple[int, ...]:
        """Size of a window, including dilation."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    @property
    def pads(self) -> tuple[int, ...] | None:
        """Padding in the layout of the attribute `pads`: beginnings, then ends. None if known only at run time."""
        return (
            self.begins + self.ends
            if isinstance(self.begins, tuple) and isinstance(self.ends, tuple)
            else None
        )

    @property
    def padded(self) -> bool:
        """True if there may be padding."""
        return self.pads is None or any(self.pads)

    @property
    def disjoint(self) -> bool:
        """True if the windows do not overlap."""
        return all(s >= e for s, e in zip(self.strides, self.extents, strict=True))


def windows_of(op: Emitter, n: NodeView, over: ir.Value, kernel: Sequence[int], result: ir.Value) -> Windows:
    """Returns the windows of a convolution or pooling node.

    Args:
        op: emitter, for padding that is computed at run time.
        n: the node.
        over: the value over which the windows slide: the node's input.
        kernel: number of taps per spatial axis.
        result: the node's output, with one position per window.
    """
    rank = len(kernel)
    strides = tuple(n.attr("strides") or [1] * rank)
    dilations = tuple(n.attr("dilations") or [1] * rank)
    pads = tuple(n.attr("pads") or [0] * 2 * rank)
    # VALID means no padding, regardless of `pads`.
    if n.attr("auto_pad") == "VALID":
        pads = (0,) * (2 * rank)
    windows = Windows(tuple(kernel), strides, dilations, pads[:rank], pads[rank:])
    if n.attr("auto_pad") in ("SAME_UPPER", "SAME_LOWER"):
        begins, ends = _same_pads(op, windows, over, result)
        # If the total is odd, the extra position is at the beginning for SAME_LOWER, at the end for SAME_UPPER.
        if n.attr("auto_pad") == "SAME_LOWER":
            begins, ends = ends, begins
        return Windows(tuple(kernel), strides, dilations, begins, ends)
    return windows


def _same_pads(op: Emitter, w: Windows, over: ir.Value, result: ir.Value) -> tuple[Sizes, Sizes]:
    """Returns the padding for auto_pad SAME, with which ceil(size / stride) windows fit along each axis.

    Args:
        op: emitter, for padding that is computed at run time.
        w: the windows; their padding is ignored.
        over: the value over which the windows slide.
        result: the node's output, with one position per window.

    Returns:
        The padding per axis, split into halves: total // 2, and the rest, which is one larger if the total is odd.
    """
    # With stride 1, the padding does not depend on the sizes, which may be symbolic.
    if all(s == 1 for s in w.strides):
        totals = [extent - 1 for extent in w.extents]
    else:
        sizes, counts = spatial_sizes(over), spatial_sizes(result)
        if not sizes or not counts or None in sizes or None in counts:
            spans = op.Add(op.Mul(op.Sub(_run_time_sizes(op, result), [1]), list(w.strides)), list(w.extents))
            total = op.Max(op.Sub(spans, _run_time_sizes(op, over)), [0])
            small = op.Div(total, [2])
            return small, op.Sub(total, small)
        totals = [
            max((count - 1) * stride + extent - size, 0)  # type: ignore[operator]
            for count, stride, extent, size in zip(counts, w.strides, w.extents, sizes, strict=True)
        ]
    return tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)


def spatial_sizes(value: ir.Value) -> tuple[int | None, ...]:
    """Returns the sizes of the spatial axes, i.e. all except the first two; None for symbolic ones."""
    return (static_dims(value) or ())[2:]


def sizes_without_batch(value: ir.Value) -> ir.Shape | None:
    """Returns a copy of a value's shape in which the batch size and symbolic sizes are unknown."""
    dims = static_dims(value)
    return None if dims is None else ir.Shape([None, *dims[1:]])


def _run_time_sizes(op: Emitter, value: ir.Value) -> ir.Value:
    """Returns the spatial sizes as int64 [axes]: a constant if all of them are static."""
    sizes = spatial_sizes(value)
    if sizes and None not in sizes:
        return op.const([int(size or 0) for size in sizes])
    return op.Shape(value, start=2)


def pad(op: Emitter, value: ir.Value, w: Windows) -> ir.Value:
    """Pads `value` with zeros, as specified by the windows."""
    if not w.padded:
        return value
    # A single constant if the padding is known.
    if w.pads is not None:
        return op.Pad(value, [0, 0, *w.pads[: len(w.kernel)], 0, 0, *w.pads[len(w.kernel) :]])
    return op.Pad(value, op.Concat([0, 0], w.begins, [0, 0], w.ends, axis=0))


def tap_slices(op: Emitter, padded: ir.Value, w: Windows) -> Iterator[ir.Value]:
    """Yields, for each tap in row-major order, the elements that it reads in all windows: `[batch, channels, *counts]`.

    Args:
        op: emitter.
        padded: `[batch, channels, *spatial]`, including padding.
        w: the windows.
    """
    if all(k == 1 for k in w.kernel) and all(s == 1 for s in w.strides):
        yield padded
        return
    axes = list(range(2, 2 + len(w.kernel)))
    for taps in itertools.product(*(range(0, k * d, d) for k, d in zip(w.kernel, w.dilations, strict=True))):
        # The last window ends at or before the end of the axis, so the last element that a tap reads lies as far before
        # it as the tap lies before the end of its window.
        ends = [tap - extent + 1 or _END for tap, extent in zip(taps, w.extents, strict=True)]
        yield op.Slice(padded, list(taps), ends, axes, list(w.strides))


def scatter_windows(
    op: Emitter,
    ct: ir.Value,
    weight: ir.Value,
    w: Windows,
    over: ir.Value,
    group: int = 1,
    *,
    maybe_none: bool = False,
) -> ir.Value:
    """Returns the cotangent of a convolution's input: each window adds `ct * weight` to the elements that it read.

    Args:
        op: emitter.
        ct: `[batch, M, *counts]`.
        weight: `[M, C / group, *kernel]`, the layout of `Conv`.
        w: the windows.
        over: the value that the windows slid over; provides the spatial sizes of the result.
        group: number of channel groups.
        maybe_none: True if there may be no windows at all, which ONNX Runtime allows only for pooling.

    Returns:
        `[batch, C, *spatial]`.
    """
    # ONNX Runtime may crash on a ConvTranspose without windows.
    if 0 in spatial_sizes(ct):
        return _empty_result(op, weight, over, group)
    single = math.prod(w.kernel) == 1 and set(w.strides) == {1} and not w.padded
    if single and not maybe_none and None not in (static_dims(weight) or (None,)):
        return _product_with_weight(op, ct, weight, group)
    common = {"strides": w.strides, "dilations": w.dilations, "group": group, "kernel_shape": w.kernel}
    open_ended = maybe_none and None in (spatial_sizes(ct) or (None,))
    if w.pads is not None and not open_ended:
        rest = _uncovered(w, w.pads, spatial_sizes(over), spatial_sizes(ct))
        if rest is not None:
            return op.ConvTranspose(ct, weight, pads=w.pads, output_padding=rest, **common)
    # Up to stride - 1 positions at the end are in no window, and windows may extend beyond the end: make the result
    # large enough for both, then slice out the part that is the input.
    room: dict[str, Any] = {"output_padding": [s - 1 for s in w.strides]}
    # An additional window of zeros adds nothing, and ensures that there is at least one window.
    if open_ended:
        ct, room = op.Pad(ct, [0] * (4 + len(w.kernel)) + [1] * len(w.kernel)), {}
    wide = op.ConvTranspose(ct, weight, **room, **common)
    axes = list(range(2, 2 + len(w.kernel)))
    begins = op.const(list(w.begins)) if isinstance(w.begins, tuple) else w.begins
    return op.Slice(wide, begins, op.Add(begins, _run_time_sizes(op, over)), axes)


def _product_with_weight(op: Emitter, ct: ir.Value, weight: ir.Value, group: int) -> ir.Value:
    """Returns the cotangent of the input of a convolution with one tap, stride 1 and no padding.

    This is a Conv of `ct`, whose weight has rows and columns of each group exchanged. ConvTranspose would write the
    product once more.
    """
    rows, columns, *kernel = (int(size or 0) for size in static_dims(weight) or ())
    if group == 1:
        turned = op.Transpose(weight, perm=[1, 0, *range(2, 2 + len(kernel))])
    else:
        turned = op.Transpose(op.Reshape(weight, [group, rows // group, columns]), perm=[0, 2, 1])
        turned = op.Reshape(turned, [group * columns, rows // group, *kernel])
    return op.Conv(ct, turned, group=group, kernel_shape=kernel)


def _empty_result(op: Emitter, weight: ir.Value, over: ir.Value, group: int) -> ir.Value:
    """Returns zeros with the shape of `over`, but with the weight's number of channels."""
    channels = op.Mul(op.dim(weight, 1), [group])
    shape = op.Concat(op.dim(over, 0), channels, op.Shape(over, start=2), axis=0)
    return op.Expand(op.const(0, like=weight), shape)


def _uncovered(
    w: Windows, pads: Sequence[int], sizes: Sequence[int | None], counts: Sequence[int | None]
) -> list[int] | None:
    """Counts the positions at the end of each axis that no window covers.

    Args:
        w: the windows.
        pads: padding at the beginnings of all axes, then at the ends.
        sizes: sizes of the spatial axes, without padding; None for symbolic ones.
        counts: number of windows along each axis; None for symbolic ones.

    Returns:
        The counts, or None if they are unknown or windows extend beyond the end.
    """
    rest = []
    for axis, stride in enumerate(w.strides):
        size, count = (sizes[axis], counts[axis]) if sizes and counts else (None, None)
        # With stride 1, the windows cover every position, even if the size is symbolic.
        if stride == 1:
            rest.append(0)
            continue
        if size is None or count is None:
            return None
        padded = size + pads[axis] + pads[axis + len(w.strides)]
        rest.append(padded - w.extents[axis] - (count - 1) * stride)
    return rest if all(0 <= r < s for r, s in zip(rest, w.strides, strict=True)) else None
