"""Compares a derivative with finite differences, and tells a wrong derivative from differences that cannot decide."""

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
    """The result of a comparison.

    Attributes:
        verdict: "agrees", "differs", or "inconclusive" if the differences cannot decide.
        difference: the central difference nearest to the derivative, among those that decide.
        reason: explanation of an inconclusive comparison, e.g. "a kink: the slope is 0 on one side and 1 on the other";
            else empty.
    """

    verdict: Verdict
    difference: float
    reason: str = ""


def compare(function: Callable[[float], float], derivative: float, step: float, margin: float) -> Comparison:
    """Compares the derivative of a function of one number at 0 with central differences.

    If the difference at the first step is within `margin` of the derivative, they agree. Otherwise differences at
    larger steps are taken. If two neighbours are within `margin` of each other, they are settled and decide: neither
    rounding errors nor kinks nearby move them. At a kink at 0 itself, as of a ReLU of zeros, one-sided differences do
    not approach each other as the step shrinks.

    Args:
        function: computes the value for a step along the direction, e.g. function(-1e-5).
        derivative: the derivative to check.
        step: the first step, e.g. 1e-5.
        margin: the largest distance between derivative and difference that counts as agreement, e.g. 1e-3.
    """
    differences: list[float] = []
    for factor in _STEPS:
        size = factor * step
        differences.append((function(size) - function(-size)) / (2 * size))
        # The first difference may settle it alone: to agree by chance it would have to hit the margin.
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
    """Returns the differences that the difference at the next larger step confirms."""
    return [near for near, far in itertools.pairwise(differences) if abs(near - far) <= margin]


def _kink(
    function: Callable[[float], float], derivative: float, step: float, margin: float
) -> tuple[float, float] | None:
    """Returns the slopes on both sides of 0 if there is a kink and the derivative lies between them, else None."""
    # A derivative outside of both slopes is wrong whatever convention holds at the kink.
    middle = function(0.0)

    def sides(size: float) -> tuple[float, float]:
        return (middle - function(-size)) / size, (function(size) - middle) / size

    near, far = sides(step), sides(16 * step)
    gap = abs(near[1] - near[0])
    # For a smooth function the gap between the slopes shrinks with the step, here to a sixteenth; at a kink it stays.
    if gap <= margin or gap < abs(far[1] - far[0]) / 2:
        return None
    return near if min(near) - margin <= derivative <= max(near) + margin else None
