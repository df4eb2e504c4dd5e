"""Linear interpolation between the pixels of an image, at positions that are data.

Along each axis a sample lies between the pixel `low` and the next one, at `weight` of the way; its value is the sum
over the corners of that cell. Values of several axes broadcast against each other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.emitter import Emitter

__all__ = ["Place", "corners", "pixel", "place_at", "product", "slopes", "weights"]


@dataclass(frozen=True)
class Place:
    """Where samples lie on one axis of an image; floating-point values of one dtype.

    Attributes:
        low: the pixel at or before each sample; `weight` how far the sample is on the way to the next one, None
            where all samples are pixels.
        size: how many pixels there are, int64 [1]; `last` the index of the last one.
    """

    low: ir.Value
    weight: ir.Value | None
    size: ir.Value
    last: ir.Value


def place_at(op: Emitter, where: ir.Value, size: ir.Value) -> Place:
    """Returns the place of samples at the positions `where` of an axis of `size` pixels."""
    low = op.Floor(where)
    return Place(low, op.Sub(where, low), size, op.Sub(op.Cast(size, to=where.dtype), 1.0))


def corners(places: Sequence[Place]) -> list[tuple[int, ...]]:
    """Returns the corners of a cell, as steps along each axis."""
    return list(itertools.product(*((0,) if place.weight is None else (0, 1) for place in places)))


def pixel(
    op: Emitter, places: Sequence[Place], corner: Sequence[int], *, zeros: bool
) -> tuple[ir.Value, ir.Value | None]:
    """Returns the flat index of the pixel at a corner, and whether it exists (1 or 0).

    Args:
        op: emitter.
        places: of the samples, one per axis.
        corner: of the cell.
        zeros: whether there are zeros around the image; else, the nearest pixels and None.
    """
    flat, inside = None, []
    for place, step in zip(places, corner, strict=True):
        index = op.Add(place.low, float(step)) if step else place.low
        if zeros:
            exists = op.And(op.GreaterOrEqual(index, 0.0), op.LessOrEqual(index, place.last))
            inside.append(op.Cast(exists, to=place.low.dtype))
        index = op.Cast(op.Min(op.Max(index, 0.0), place.last), to=ir.DataType.INT64)
        flat = index if flat is None else op.Add(op.Mul(flat, place.size), index)
    assert flat is not None
    return flat, product(op, inside)


def weights(op: Emitter, places: Sequence[Place], corner: Sequence[int]) -> list[ir.Value]:
    """Returns the weight of a corner along each axis."""
    return [
        place.weight if step else op.Sub(1.0, place.weight)
        for place, step in zip(places, corner, strict=True)
        if place.weight is not None
    ]


def slopes(op: Emitter, places: Sequence[Place], values: Sequence[ir.Value]) -> list[ir.Value]:
    """Returns the cotangents of the positions along each axis; `values` are those of the weights of the corners."""
    found = []
    for axis in range(len(places)):
        total = None
        for corner, value in zip(corners(places), values, strict=True):
            others = [w for i, w in enumerate(weights(op, places, corner)) if i != axis]
            term = product(op, [value, *others])
            term = term if corner[axis] else op.Neg(term)
            total = term if total is None else op.Add(total, term)
        assert total is not None
        found.append(total)
    return found


def product(op: Emitter, values: Sequence[ir.Value]) -> ir.Value | None:
    """Returns the product of some values, None of none."""
    return functools.reduce(op.Mul, values) if values else None
