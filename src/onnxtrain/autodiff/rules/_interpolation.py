"""Interpolation between the pixels of an image, at positions that are data.

Along each axis a sample lies between the pixel `low` and the next one, at `weight` of the way; its value is the sum
over the corners of that cell, or, where it is cubic, over those of the cells around it, too. Values of several axes
broadcast against each other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxtrain.emitter import Emitter

_A = -0.75
_CUBIC = {
    -1: (0.0, _A, -2 * _A, _A),
    0: (1.0, 0.0, -_A - 3, _A + 2),
    1: (0.0, -_A, 2 * _A + 3, -_A - 2),
    2: (0.0, 0.0, _A, -_A),
}
"""Weights of the pixels at steps from `low`, as polynomials of the way to the next one: Keys, "Cubic convolution
interpolation for digital image processing", 1981, with the parameter that ONNX and PyTorch have."""


@dataclass(frozen=True)
class Tap:
    """A pixel near samples on one axis.

    Attributes:
        index: which one it is, possibly outside of the image.
        weight: what it weighs in the value; `slope` the derivative of that in the position.
    """

    index: ir.Value
    weight: ir.Value
    slope: ir.Value


@dataclass(frozen=True)
class Place:
    """Where samples lie on one axis of an image; floating-point values of one dtype.

    Attributes:
        low: the pixel at or before each sample; `weight` how far the sample is on the way to the next one, None
            where all samples are pixels.
        size: how many pixels there are, int64 [1]; `last` the index of the last one.
        taps: pixels by steps from `low`; None where a sample lies between two, linearly.
    """

    low: ir.Value
    weight: ir.Value | None
    size: ir.Value
    last: ir.Value
    taps: Mapping[int, Tap] | None = None


def place_at(op: Emitter, where: ir.Value, size: ir.Value) -> Place:
    """Returns the place of samples at the positions `where` of an axis of `size` pixels."""
    low = op.Floor(where)
    return Place(low, op.Sub(where, low), size, op.Sub(op.Cast(size, to=where.dtype), 1.0))


def cubic_place_at(
    op: Emitter, where: ir.Value, size: ir.Value, brought_in: Callable[[ir.Value], ir.Value]
) -> Place:
    """Returns the place of samples, between four pixels each.

    Args:
        op: emitter.
        where: their positions on an axis.
        size: how many pixels that has.
        brought_in: gives the indices that stand for given ones, which may lie outside of the image.
    """
    place = place_at(op, where, size)
    assert place.weight is not None
    taps = {}
    for step, (c0, c1, c2, c3) in _CUBIC.items():
        weight = _polynomial(op, place.weight, (c0, c1, c2, c3))
        slope = _polynomial(op, place.weight, (c1, 2 * c2, 3 * c3))
        taps[step] = Tap(brought_in(op.Add(place.low, float(step))), weight, slope)
    return replace(place, taps=taps)


def _polynomial(op: Emitter, x: ir.Value, coefficients: Sequence[float]) -> ir.Value:
    """Returns the value of a polynomial, its constant term first, by Horner's scheme."""
    *rest, last = coefficients
    total = op.Mul(x, last)
    for coefficient in reversed(rest[1:]):
        total = op.Mul(op.Add(total, coefficient) if coefficient else total, x)
    return op.Add(total, rest[0]) if rest[0] else total


def corners(places: Sequence[Place]) -> list[tuple[int, ...]]:
    """Returns the corners of a cell, or of those around it, as steps along each axis."""
    return list(itertools.product(*map(_steps, places)))


def _steps(place: Place) -> tuple[int, ...]:
    if place.taps is not None:
        return tuple(place.taps)
    return (0,) if place.weight is None else (0, 1)


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
        if place.taps is not None:
            index = place.taps[step].index
        else:
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
    found = []
    for place, step in zip(places, corner, strict=True):
        if place.taps is not None:
            found.append(place.taps[step].weight)
        elif place.weight is not None:
            found.append(place.weight if step else op.Sub(1.0, place.weight))
    return found


def slopes(op: Emitter, places: Sequence[Place], values: Sequence[ir.Value]) -> list[ir.Value]:
    """Returns the cotangents of the positions along each axis; `values` are those of the weights of the corners."""
    found = []
    for axis, place in enumerate(places):
        total = None
        for corner, value in zip(corners(places), values, strict=True):
            others = [w for i, w in enumerate(weights(op, places, corner)) if i != axis]
            term = product(op, [value, *others])
            if place.taps is not None:
                term = op.Mul(term, place.taps[corner[axis]].slope)
            else:
                term = term if corner[axis] else op.Neg(term)
            total = term if total is None else op.Add(total, term)
        assert total is not None
        found.append(total)
    return found


def product(op: Emitter, values: Sequence[ir.Value]) -> ir.Value | None:
    """Returns the product of some values, None of none."""
    return functools.reduce(op.Mul, values) if values else None
