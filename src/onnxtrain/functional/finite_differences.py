"""Compares a derivative with finite differences, and distinguishes wrong derivatives from inconclusive differences."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["agrees", "differs", "inconclusive"]

_STEPS = (1.0, 4.0, 16.0, 64.0, 256.0)
"""Multiples of the first step. As the step grows, rounding errors shrink and truncation errors grow quadratically."""


@dataclass(frozen=True)
class Comparison:
    """Result of comparing a derivative with finite differences.

    Attributes:
        verdict: "agrees"; "differs"; or "inconclusive" if no finite difference is stable or the function has a kink.
        difference: the central difference that agrees with the derivative; otherwise the stable difference nearest to
            the derivative, or the nearest of all differences if none is stable.
        reason: why the comparison is inconclusive, e.g. "a kink: the slope is 0 on one side and 1 on the other";
            otherwise empty.
    """

    verdict: Verdict
    difference: float
    reason: str = ""


def compare(function: Callable[[float], float], derivative: float, step: float, margin: float) -> Comparison:
    """Compares the derivative of a scalar function at 0 with central differences.

    If the difference at the first step is within `margin` of the derivative, they agree. Otherwise, larger steps are
    tried, and only stable differences are compared. A difference is stable if it is within `margin` of the difference
    at the next larger step: then neither rounding errors nor nearby kinks distort it. If 0 itself is a kink, as for
    ReLU, the one-sided differences do not approach each other as the step shrinks, and the result is inconclusive for
    any derivative between them.

    Args:
        function: computes the value after a step along the direction, e.g. function(-1e-5).
        derivative: the derivative to check.
        step: the first step, e.g. 1e-5.
        margin: largest accepted distance between the derivative and a difference, e.g. 1e-3.
    """
    differences: list[float] = []
    for factor in _STEPS:
        size = factor * step
        differences.append((function(size) - function(-size)) / (2 * size))
        # Agreement with the first difference suffices: it is very unlikely to happen by chance.
        settled = _converged(differences, margin) if len(differences) > 1 else differences
        for difference in settled:
            if abs(difference - derivative) <= margin:
                return Comparison("agrees", difference)
    settled = _converged(differences, margin)
    nearest = min(settled or differences, key=lambda difference: abs(difference - derivative))
    if not settled:
        spread = max(differences) - min(differences)
        reason = f"differences at steps {step:.0e} to {size:.0e} are not stable: they differ by {spread:.2g}"
        return Comparison("inconclusive", nearest, reason)
    if sides := _kink(function, derivative, step, margin):
        reason = f"a kink: the slope is {sides[0]:.4g} on one side and {sides[1]:.4g} on the other"
        return Comparison("inconclusive", nearest, reason)
    return Comparison("differs", nearest)


def _converged(differences: Sequence[float], margin: float) -> list[float]:
    """Returns the differences that are within `margin` of the difference at the next larger step."""
    return [near for near, far in itertools.pairwise(differences) if abs(near - far) <= margin]


def _kink(
    function: Callable[[float], float], derivative: float, step: float, margin: float
) -> tuple[float, float] | None:
    """Checks whether a function has a kink at 0.

    Args:
        function: computes the value after a step along the direction.
        derivative: the derivative to check.
        step: step of the one-sided differences, e.g. 1e-5.
        margin: tolerance for the slopes. Slopes closer than this are not a kink, and the derivative may lie outside of
            the slopes by this much.

    Returns:
        The slopes left and right of 0 if 0 is a kink and the derivative lies between the slopes; otherwise None.
    """
    # A derivative outside of the two slopes is wrong under any convention for kinks.
    middle = function(0.0)

    def sides(size: float) -> tuple[float, float]:
        return (middle - function(-size)) / size, (function(size) - middle) / size

    near, far = sides(step), sides(16 * step)
    gap = abs(near[1] - near[0])
    # For a smooth function the gap between the slopes is proportional to the step: here, a sixteenth. At a kink it
    # remains.
    if gap <= margin or gap < abs(far[1] - far[0]) / 2:
        return None
    return near if min(near) - margin <= derivative <= max(near) + margin else None
