"""Compare a derivative along a direction with finite differences, and tell a wrong derivative from bad differences."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["agrees", "differs", "inconclusive"]

_STEPS = (1.0, 4.0, 16.0, 64.0, 256.0)
"""Multiples of the first step. Errors by rounding shrink as the step grows; those by curvature grow with its square."""


@dataclass(frozen=True)
class Comparison:
    """A derivative beside the difference that decides about it.

    Attributes:
        verdict: "agrees", "differs", or "inconclusive" where differences cannot decide.
        difference: the central difference nearest to the derivative among those that decide.
        reason: why it is inconclusive, else empty.
    """

    verdict: Verdict
    difference: float
    reason: str = ""


def compare(function: Callable[[float], float], derivative: float, step: float, margin: float) -> Comparison:
    """Compare the derivative of a function of one number at 0 with differences of the function.

    A central difference at the first step that is within `margin` settles it. Otherwise, differences at larger steps
    are taken until two neighbours are within `margin` of each other: neither rounding errors nor kinks nearby move
    these. A kink at 0 itself, as of a ReLU of zeros, shows in one-sided differences that do not come closer as the
    step shrinks.

    Args:
        function: computes a value for a step along the direction.
        derivative: what is to be judged.
        step: the first step.
        margin: the largest distance between derivative and difference.
    """
    differences: list[float] = []
    for factor in _STEPS:
        size = factor * step
        differences.append((function(size) - function(-size)) / (2 * size))
        settled = _settled(differences, margin) if len(differences) > 1 else differences
        for difference in settled:
            if abs(difference - derivative) <= margin:
                return Comparison("agrees", difference)
    settled = _settled(differences, margin)
    nearest = min(settled or differences, key=lambda difference: abs(difference - derivative))
    if not settled:
        spread = max(differences) - min(differences)
        reason = f"differences at steps {step:.0e} to {size:.0e} do not settle: they lie {spread:.2g} apart"
        return Comparison("inconclusive", nearest, reason)
    if sides := _kink(function, derivative, step, margin):
        reason = f"a kink: the slope is {sides[0]:.4g} on one side and {sides[1]:.4g} on the other"
        return Comparison("inconclusive", nearest, reason)
    return Comparison("differs", nearest)


def _settled(differences: Sequence[float], margin: float) -> list[float]:
    """Return the differences that one at the next larger step confirms."""
    return [near for near, far in itertools.pairwise(differences) if abs(near - far) <= margin]


def _kink(
    function: Callable[[float], float], derivative: float, step: float, margin: float
) -> tuple[float, float] | None:
    """Return the slopes on both sides of 0 where they are those of a kink that the derivative lies between."""
    middle = function(0.0)

    def sides(size: float) -> tuple[float, float]:
        return (middle - function(-size)) / size, (function(size) - middle) / size

    near, far = sides(step), sides(16 * step)
    gap = abs(near[1] - near[0])
    # Of a smooth function the gap at the smaller step is a sixteenth of the other.
    if gap <= margin or gap < abs(far[1] - far[0]) / 2:
        return None
    return near if min(near) - margin <= derivative <= max(near) + margin else None
