"""Interpolates between the pixels of an image at positions that are computed, and differentiates that.

Along each axis a sample lies between the pixel `low` and the next one, at the fraction `weight` of the way. Its value
is a weighted sum over the corners of that cell; for cubic interpolation, over the corners of the neighbouring cells,
too. Indices and weights of several axes broadcast against each other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxtrain.emitter import Emitter

# Keys' parameter a of the cubic kernel, as ONNX's GridSample and PyTorch have it.
_A = -0.75
_CUBIC = {
    -1: (0.0, _A, -2 * _A, _A),
    0: (1.0, 0.0, -_A - 3, _A + 2),
    1: (0.0, -_A, 2 * _A + 3, -_A - 2),
    2: (0.0, 0.0, _A, -_A),
}
"""By step from `low`, the weight of that pixel as a polynomial of `weight`, constant term first.

Keys, "Cubic convolution interpolation for digital image processing", 1981.
"""


@dataclass(frozen=True)
class Tap:
    """One of the pixels that a sample is interpolated from, along one axis.

    Attributes:
        index: its index, possibly outside of the image.
        weight: its weight in the sample.
        slope: derivative of the weight with respect to the position.
    """

    index: ir.Value
    weight: ir.Value
    slope: ir.Value


@dataclass(frozen=True)
class Place:
    """Positions of samples on one axis of an image; floating-point values of one dtype.

    Attributes:
        low: index of the pixel at or before each sample.
        weight: fraction of the way from there to the next pixel, 0 to 1; None if all samples are pixels.
        size: number of pixels, int64 [1].
        last: index of the last pixel.
        taps: by step from `low`, -1 to 2, the pixels of cubic interpolation; None for linear interpolation.
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
        where: positions of the samples on an axis.
        size: number of pixels of the axis.
        brought_in: replaces indices outside of the image, e.g. by the reflected ones.
    """
    place = place_at(op, where, size)
    assert place.weight is not None
    taps = {}
    for step, (c0, c1, c2, c3) in _CUBIC.items():
        weight = _polynomial(op, place.weight, (c0, c1, c2, c3))
        # By the position as by `weight`, which grows as fast as the position does.
        slope = _polynomial(op, place.weight, (c1, 2 * c2, 3 * c3))
        taps[step] = Tap(brought_in(op.Add(place.low, float(step))), weight, slope)
    return replace(place, taps=taps)


def _polynomial(op: Emitter, x: ir.Value, coefficients: Sequence[float]) -> ir.Value:
    """Evaluates a polynomial at x by Horner's scheme; coefficients from the constant term on."""
    *rest, last = coefficients
    total = op.Mul(x, last)
    for coefficient in reversed(rest[1:]):
        total = op.Mul(op.Add(total, coefficient) if coefficient else total, x)
    return op.Add(total, rest[0]) if rest[0] else total


def corners(places: Sequence[Place]) -> list[tuple[int, ...]]:
    """Lists the pixels around a sample as steps from `low` along each axis, e.g. [(0, 0), (0, 1), (1, 0), (1, 1)]."""
    return list(itertools.product(*map(_steps, places)))


def _steps(place: Place) -> tuple[int, ...]:
    """Returns the steps from `low` to the pixels of a sample along one axis."""
    if place.taps is not None:
        return tuple(place.taps)
    return (0,) if place.weight is None else (0, 1)


def pixel(
    op: Emitter, places: Sequence[Place], corner: Sequence[int], *, zeros: bool
) -> tuple[ir.Value, ir.Value | None]:
    """Returns the flat index of the pixel at a corner, and 1 or 0 for a pixel inside or outside of the image.

    Args:
        op: emitter.
        places: of the samples, one per axis.
        corner: steps from `low`, an entry of :func:`corners`.
        zeros: True if the image is padded with zeros. False takes the nearest pixel for one outside, and returns None
            as the second value.
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
        # Clipped in both modes: Gather must not be asked for an index outside, even if the result is multiplied by 0.
        index = op.Cast(op.Min(op.Max(index, 0.0), place.last), to=ir.DataType.INT64)
        flat = index if flat is None else op.Add(op.Mul(flat, place.size), index)
    assert flat is not None
    return flat, product(op, inside)


def weights(op: Emitter, places: Sequence[Place], corner: Sequence[int]) -> list[ir.Value]:
    """Returns the weight of a corner along each axis; none for axes on which all samples are pixels."""
    result = []
    for place, step in zip(places, corner, strict=True):
        if place.taps is not None:
            result.append(place.taps[step].weight)
        elif place.weight is not None:
            result.append(place.weight if step else op.Sub(1.0, place.weight))
    return result


def slopes(op: Emitter, places: Sequence[Place], values: Sequence[ir.Value]) -> list[ir.Value]:
    """Returns the cotangents of the positions along each axis from those of the weights of the corners, `values`."""
    result = []
    for axis, place in enumerate(places):
        total = None
        for corner, value in zip(corners(places), values, strict=True):
            others = [w for i, w in enumerate(weights(op, places, corner)) if i != axis]
            term = product(op, [value, *others])
            if place.taps is not None:
                term = op.Mul(term, place.taps[corner[axis]].slope)
            else:
                # The weights are 1 - weight and weight: their slopes are -1 and 1.
                term = term if corner[axis] else op.Neg(term)
            total = term if total is None else op.Add(total, term)
        assert total is not None
        result.append(total)
    return result


def product(op: Emitter, values: Sequence[ir.Value]) -> ir.Value | None:
    """Returns the product of the values; None if there are none."""
    return functools.reduce(op.Mul, values) if values else None
