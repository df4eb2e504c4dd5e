"""Finds axes along which an Expand repeats a tensor, and computes the tensor without them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import onnx_ir as ir

from onnxtrain.passes.shapes.dims import same_size

Write = Callable[..., ir.Value]


def repeated_axes(value: ir.Value) -> frozenset[int]:
    """Returns axes along which all elements of a value are equal because an Expand has repeated them.

    Looks through Reshape and Transpose. Needs inferred shapes.
    """
    node = value.producer()
    source = node.inputs[0] if node is not None and node.inputs else None
    if node is None or source is None or node.domain != "" or source.shape is None or value.shape is None:
        return frozenset()
    if node.op_type == "Expand" and len(source.shape) == len(value.shape):
        sizes = zip(source.shape, value.shape, strict=True)
        own = {axis for axis, (small, large) in enumerate(sizes) if small == 1 and large != 1}
        return repeated_axes(source) | own
    if node.op_type == "Transpose":
        perm, below = permutation(node), repeated_axes(source)
        return frozenset(axis for axis, before in enumerate(perm) if before in below)
    if node.op_type == "Reshape":
        moved = _kept_axes(source.shape, value.shape)
        # A Reshape may also merge a repeated axis with another one, so that none of the result's axes is repeated.
        below = repeated_axes(source)
        return frozenset(moved[axis] for axis in below) if below <= moved.keys() else frozenset()
    return frozenset()


def without_axes(write: Write, value: ir.Value, axes: Collection[int]) -> ir.Value | None:
    """Emits a value without its repeated axes, before the Expand if possible.

    Args:
        write: emits a node and returns its output.
        value: the value.
        axes: all its repeated axes, as returned by :func:`repeated_axes`.

    Returns:
        The value without `axes`; None if a symbolic size stands in the way.
    """
    if not axes:
        return value
    node = value.producer()
    assert node is not None
    source = node.inputs[0]
    assert source is not None
    assert source.shape is not None
    assert value.shape is not None
    below = repeated_axes(source)
    kept = [size for axis, size in enumerate(value.shape) if axis not in axes]
    inner = without_axes(write, source, below)
    if inner is None:
        return None
    inner.shape = ir.Shape([size for axis, size in enumerate(source.shape) if axis not in below])
    if node.op_type == "Expand":
        ones = sorted(set(axes) - below)
        result = write("Squeeze", inner, [axis - sum(other < axis for other in below) for axis in ones])
    elif node.op_type == "Transpose":
        perm = [axis for axis in permutation(node) if axis not in below]
        places = {axis: place for place, axis in enumerate(sorted(perm))}
        result = write("Transpose", inner, perm=[places[axis] for axis in perm])
    else:
        # A zero copies the size of the input's axis with the same index.
        sizes = [
            0 if not isinstance(size, int) and same_size(size, _at(inner.shape, axis)) else size
            for axis, size in enumerate(kept)
        ]
        if 0 in kept or not all(isinstance(size, int) for size in sizes):
            return None
        result = write("Reshape", inner, sizes)
    result.type, result.shape = value.type, ir.Shape(kept)
    return result


def _at(shape: ir.Shape, axis: int) -> object:
    return shape[axis] if axis < len(shape) else None


def permutation(transpose: ir.Node) -> list[int]:
    """Returns the order of axes of a Transpose, whose input has a known rank."""
    x = transpose.inputs[0]
    rank = len(x.shape) if x is not None and x.shape is not None else 0
    return list(transpose.attributes.get_ints("perm") or reversed(range(rank)))


def inverse_permutation(perm: Sequence[int]) -> list[int]:
    """Returns the order of axes that undoes a Transpose by `perm`."""
    return sorted(range(len(perm)), key=perm.__getitem__)


def _kept_axes(before: ir.Shape, after: ir.Shape) -> dict[int, int]:
    """Maps axes of a Reshape's input to axes of its result, for those outside the merged and split axes."""
    kept: dict[int, int] = {}
    shorter = min(len(before), len(after))
    for axis in range(shorter):
        if not same_size(before[axis], after[axis]):
            break
        kept[axis] = axis
    for axis in range(1, shorter + 1):
        if not same_size(before[-axis], after[-axis]):
            break
        kept.setdefault(len(before) - axis, len(after) - axis)
    return kept
