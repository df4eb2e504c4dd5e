"""Sums the contributions to a cotangent; contributions that tile it as slices are concatenated instead of added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.emitter import Emitter, static_dims


@dataclass(frozen=True)
class _Part:
    """A zero-padded contribution to a cotangent: it is zero outside a range along one axis.

    Attributes:
        padded: the contribution, the output of a Pad.
        content: the input of that Pad, without the zeros.
        axis: the padded axis, non-negative.
        size: size of that axis in `padded`, e.g. 12.
        before: number of zeros before `content` along the axis, e.g. 4.
        after: number of zeros after `content` along the axis.
    """

    padded: ir.Value
    content: ir.Value
    axis: int
    size: int
    before: int
    after: int


def add_up(op: Emitter, parts: Sequence[ir.Value]) -> ir.Value:
    """Returns the sum of contributions of the same shape and dtype.

    If the forward graph slices a value, e.g. into queries, keys and values or into the gates of a recurrent cell, each
    slice contributes a cotangent that is zero outside the slice. Slices that tile the whole value are concatenated.
    """
    # One Concat costs a third of padding every slice to full size and adding the padded tensors.
    joined = _join(op, [part for value in parts if (part := _as_part(value)) is not None])
    if joined is not None:
        content, covered = joined
        parts = [content, *(value for value in parts if value not in covered)]
    total = parts[0]
    for value in parts[1:]:
        total = op.Add(total, value)
    return total


def _join(op: Emitter, parts: Sequence[_Part]) -> tuple[ir.Value, list[ir.Value]] | None:
    """Concatenates the contents of padded contributions if they tile the whole value.

    Returns:
        The concatenation and the padded contributions that it replaces, or None if the contents leave a gap, overlap,
        or lie along different axes.
    """
    ordered = sorted(parts, key=lambda part: part.before)
    if len(ordered) < 2 or len({part.axis for part in ordered}) != 1:
        return None
    # Each slice must begin where the previous one ends: a gap or an overlap needs a sum.
    ends = [0, *(part.size - part.after for part in ordered)]
    if [part.before for part in ordered] != ends[:-1] or ends[-1] != ordered[0].size:
        return None
    joined = op.Concat(*(part.content for part in ordered), axis=ordered[0].axis)
    return joined, [part.padded for part in ordered]


def _as_part(value: ir.Value) -> _Part | None:
    """Splits the output of a Pad with zeros along one axis into its content and its padding.

    Returns:
        The parts, or None if `value` is not the output of such a Pad.
    """
    node = value.producer()
    if node is None or node.op_type != "Pad" or node.domain != "" or "mode" in node.attributes:
        return None
    # Omitted trailing inputs are missing from the list.
    content, pads, fill, axes = [*node.inputs, None, None, None][:4]
    sizes = static_dims(value)
    if content is None or pads is None or pads.const_value is None or fill is not None or sizes is None:
        return None
    along = list(range(len(sizes)))
    if axes is not None:
        if axes.const_value is None:
            return None
        along = axes.const_value.numpy().tolist()
    before, after = pads.const_value.numpy().reshape(2, -1).tolist()
    padded = [i for i in range(len(along)) if before[i] or after[i]]
    # Negative pads crop.
    if len(padded) != 1 or min(*before, *after) < 0:
        return None
    index = padded[0]
    axis = along[index] % len(sizes)
    size = sizes[axis]
    return None if size is None else _Part(value, content, axis, size, before[index], after[index])
