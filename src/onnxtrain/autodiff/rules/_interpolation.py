"""Interpolates an image at computed positions, and differentiates the interpolation.

Along each axis, a sample lies between the pixel `low` and the next pixel, at the fraction `weight` of the way. Its
value is a weighted sum over the corners of that cell; cubic interpolation also uses the corners of the neighboring
cells. Indices and weights of different axes broadcast against each other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxtrain.emitter import Emitter

# Parameter a of the cubic kernel, with the value used by ONNX's GridSample and PyTorch.
_A = -0.75
_CUBIC = {
    -1: (0.0, _A, -2 * _A, _A),
    0: (1.0, 0.0, -_A - 3, _A + 2),
    1: (0.0, -_A, 2 * _A + 3, -_A - 2),
    2: (0.0, 0.0, _A, -_A),
}
"""Weight of the pixel at each offset from `low`: a polynomial in `weight`, constant term first.

Keys, "Cubic convolution interpolation for digital image processing", 1981.
"""


@dataclass(frozen=True)
class Tap:
    """One of the pixels from which a sample is interpolated, along one axis.

    Attributes:
        index: index of the pixel, possibly outside the image.
        weight: interpolation weight of the pixel.
        slope: derivative of the weight with respect to the sample's position.
    """

    index: ir.Value
    weight: ir.Value
    slope: ir.Value


@dataclass(frozen=True)
class Place:
    """Positions of samples along one axis of an image. All values but `size` have the same floating-point dtype.

    Attributes:
        low: index of the pixel at or before each sample.
        weight: fraction of the way from `low` to the next pixel, 0 to 1; None if all samples lie on pixels.
        size: number of pixels, int64 [1].
        last: index of the last pixel.
        taps: for cubic interpolation, the pixel at each offset from `low`, -1 to 2; None for linear interpolation.
    """

    low: ir.Value
    weight: ir.Value | None
    size: ir.Value
    last: ir.Value
    taps: Mapping[int, Tap] | None = None


def place_at(op: Emitter, where: ir.Value, size: ir.Value) -> Place:
    """Returns the `Place` for linear interpolation at positions `where` along an axis with `size` pixels."""
    low = op.Floor(where)
    return Place(low, op.Sub(where, low), size, op.Sub(op.Cast(size, to=where.dtype), 1.0))


def cubic_place_at(
    op: Emitter, where: ir.Value, size: ir.Value, into_image: Callable[[ir.Value], ir.Value]
) -> Place:
    """Returns the `Place` for cubic interpolation at positions `where`, between four pixels along the axis.

    Args:
        op: emitter.
        where: positions of the samples along the axis.
        size: number of pixels along the axis.
        into_image: maps indices outside the image into it, e.g. by reflection.
    """
    place = place_at(op, where, size)
    assert place.weight is not None
    taps = {}
    for step, (c0, c1, c2, c3) in _CUBIC.items():
        weight = _polynomial(op, place.weight, (c0, c1, c2, c3))
        # The derivative with respect to the position equals that with respect to `weight`.
        slope = _polynomial(op, place.weight, (c1, 2 * c2, 3 * c3))
        taps[step] = Tap(into_image(op.Add(place.low, float(step))), weight, slope)
    return replace(place, taps=taps)


def _polynomial(op: Emitter, x: ir.Value, coefficients: Sequence[float]) -> ir.Value:
    """Evaluates a polynomial at x with Horner's scheme; `coefficients` start with the constant term."""
    *rest, last = coefficients
    total = op.Mul(x, last)
    for coefficient in reversed(rest[1:]):
        total = op.Mul(op.Add(total, coefficient) if coefficient else total, x)
    return op.Add(total, rest[0]) if rest[0] else total


def corners(places: Sequence[Place]) -> list[tuple[int, ...]]:
    """Returns the pixels around a sample as offsets from `low` per axis, e.g. [(0, 0), (0, 1), (1, 0), (1, 1)]."""
    return list(itertools.product(*map(_steps, places)))


def _steps(place: Place) -> tuple[int, ...]:
    """Returns the offsets from `low` of the pixels that a sample uses along one axis."""
    if place.taps is not None:
        return tuple(place.taps)
    return (0,) if place.weight is None else (0, 1)


def pixel(
    op: Emitter, places: Sequence[Place], corner: Sequence[int], *, zeros: bool
) -> tuple[ir.Value, ir.Value | None]:
    """Returns the flat index of the pixel at a corner, and a mask that is 1 inside the image and 0 outside.

    Args:
        op: emitter.
        places: the places of the samples, one per axis.
        corner: offsets from `low`, an entry of :func:`corners`.
        zeros: True if the image is padded with zeros. If False, the mask is None: samples outside the image use the
            nearest pixel inside. The index is clamped to the image in both cases.
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
        # Clipped in both modes, because Gather needs a valid index even where the result is multiplied by 0.
        index = op.Cast(op.Min(op.Max(index, 0.0), place.last), to=ir.DataType.INT64)
        flat = index if flat is None else op.Add(op.Mul(flat, place.size), index)
    assert flat is not None
    return flat, product(op, inside)


def weights(op: Emitter, places: Sequence[Place], corner: Sequence[int]) -> list[ir.Value]:
    """Returns the weight of a corner along each axis, leaving out axes along which all samples lie on pixels."""
    result = []
    for place, step in zip(places, corner, strict=True):
        if place.taps is not None:
            result.append(place.taps[step].weight)
        elif place.weight is not None:
            result.append(place.weight if step else op.Sub(1.0, place.weight))
    return result


def slopes(op: Emitter, places: Sequence[Place], values: Sequence[ir.Value]) -> list[ir.Value]:
    """Returns the cotangents of the samples' positions, one value per axis.

    Args:
        op: emitter.
        places: the places of the samples, one per axis.
        values: for each corner, in the order of :func:`corners`, the cotangent of its interpolation weight, which is
            the product of its :func:`weights`.
    """
    result = []
    for axis, place in enumerate(places):
        total = None
        for corner, value in zip(corners(places), values, strict=True):
            others = [w for i, w in enumerate(weights(op, places, corner)) if i != axis]
            term = product(op, [value, *others])
            if place.taps is not None:
                term = op.Mul(term, place.taps[corner[axis]].slope)
            else:
                # The weights are 1 - weight and weight, so their slopes are -1 and 1.
                term = term if corner[axis] else op.Neg(term)
            total = term if total is None else op.Add(total, term)
        assert total is not None
        result.append(total)
    return result


def product(op: Emitter, values: Sequence[ir.Value]) -> ir.Value | None:
    """Returns the product of the values; None if there are none."""
    return functools.reduce(op.Mul, values) if values else None
