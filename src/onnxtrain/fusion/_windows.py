"""Finds Slice, Pad and reduction nodes that an elementwise program can compute."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtrain.emitter import static_dims
from onnxtrain.passes import known_array

REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin")
"""Standard ops in the order of the kernel's numbers, from 1."""

MOST_ROW = 1024
"""Maximum elements of a row: the columns of a program's values, times the elements of a column."""


@dataclass(frozen=True)
class Window:
    """A Slice or a Pad along one axis.

    Column j of the result is column j + offset of the source; for a Pad, 0 outside of the source.

    Attributes:
        source: the tensor that is sliced or padded.
        axis: the axis, counted from the end, e.g. 1 for the last one.
        offset: negative for a Pad that adds columns in front, e.g. -1.
        source_size: number of columns of the source, e.g. 12.
        size: number of columns of the result, e.g. 11.
        inner: elements of a column, i.e. the product of the sizes of the later axes, e.g. 1.
        bounded: True for a Pad.
    """

    source: ir.Value
    axis: int
    offset: int
    source_size: int
    size: int
    inner: int
    bounded: bool


@dataclass(frozen=True)
class Reduction:
    """A reduction over the first or the last axes.

    Attributes:
        op_type: one of `REDUCTIONS`.
        axes: how many of the last axes are reduced, e.g. 1; of the first axes if negative, e.g. -2.
        keepdims: True if the reduced axes remain, with size 1.
    """

    op_type: str
    axes: int
    keepdims: bool

    @property
    def is_linear(self) -> bool:
        """True for sums and means: the reduction of a sum is the sum of the reductions."""
        return self.op_type in ("ReduceSum", "ReduceMean")


def window_of(node: ir.Node) -> Window | None:
    """Returns the window that a node computes; None if it is not a Slice or a Pad with zeros of one static axis."""
    if node.domain != "" or node.op_type not in ("Slice", "Pad") or not node.inputs:
        return None
    source = node.inputs[0]
    dims = None if source is None else static_dims(source)
    if source is None or dims is None or source.dtype != ir.DataType.FLOAT:
        return None
    found = _sliced(node, dims) if node.op_type == "Slice" else _padded(node, dims)
    if found is None:
        return None
    axis, offset, size = found
    source_size, inner = dims[axis], dims[axis + 1 :]
    if source_size is None or source_size < 1 or size < 1 or None in inner:
        return None
    elements = math.prod(dim or 0 for dim in inner)
    if elements < 1 or max(source_size, size) * elements > MOST_ROW:
        return None
    return Window(source, len(dims) - axis, offset, source_size, size, elements, node.op_type == "Pad")


def reduction_of(node: ir.Node) -> Reduction | None:
    """Returns the reduction that a node computes; None for other nodes, and for axes in the middle."""
    if node.domain != "" or node.op_type not in REDUCTIONS:
        return None
    x = node.inputs[0]
    dims = None if x is None else static_dims(x)
    if x is None or not dims or x.dtype != ir.DataType.FLOAT:
        return None
    rank = len(dims)
    axes = _ints(node, 1)
    if len(node.inputs) < 2 or node.inputs[1] is None:
        axes = []
    if axes is None or (not axes and node.attributes.get_int("noop_with_empty_axes", False)):
        return None
    reduced = sorted({axis % rank for axis in axes}) or list(range(rank))
    keepdims = bool(node.attributes.get_int("keepdims", 1))
    if reduced == list(range(len(reduced))):
        return Reduction(node.op_type, -len(reduced), keepdims)
    if reduced == list(range(rank - len(reduced), rank)):
        return Reduction(node.op_type, len(reduced), keepdims)
    return None


def _ints(node: ir.Node, index: int) -> list[int] | None:
    """Returns a constant input as a list; None if it is absent or not a constant."""
    array = known_array(node.inputs[index]) if index < len(node.inputs) else None
    return None if array is None else [int(number) for number in array.reshape(-1)]


def _sliced(node: ir.Node, dims: tuple[int | None, ...]) -> tuple[int, int, int] | None:
    """Returns axis, first column and number of columns of a Slice along one axis."""
    starts, ends, axes, steps = (_ints(node, index) for index in range(1, 5))
    given = [value is not None for value in node.inputs[1:5]]
    if starts is None or ends is None or len(starts) != 1 or (len(given) > 3 and given[3] and steps != [1]):
        return None
    if len(given) > 2 and given[2]:
        if axes is None:
            return None
        axis = axes[0] % len(dims)
    else:
        axis = 0
    size = dims[axis]
    if size is None:
        return None
    start, stop, _ = slice(starts[0], ends[0]).indices(size)
    return axis, start, stop - start


def _padded(node: ir.Node, dims: tuple[int | None, ...]) -> tuple[int, int, int] | None:
    """Returns axis, first column and number of columns of a Pad with zeros along one axis."""
    fill = node.inputs[2] if len(node.inputs) > 2 else None
    zero = fill is None or ((number := known_array(fill)) is not None and not np.any(number))
    pads = _ints(node, 1)
    axes = _ints(node, 3) if len(node.inputs) > 3 and node.inputs[3] is not None else list(range(len(dims)))
    if (
        not zero
        or pads is None
        or axes is None
        or node.attributes.get_string("mode", "constant") != "constant"
    ):
        return None
    count = len(axes)
    padded = [index for index in range(count) if pads[index] or pads[index + count]]
    if len(padded) != 1:
        return None
    before, after = pads[padded[0]], pads[padded[0] + count]
    axis = axes[padded[0]] % len(dims)
    size = dims[axis]
    if size is None or before < 0 or after < 0:
        return None
    return axis, -before, size + before + after
