"""Slopes of a function by finite differences, beside gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tolerances import FINITE_DIFFERENCE

STEP = 1e-6
"""Of central differences in float64; see `FINITE_DIFFERENCE`."""


def assert_gradient(
    loss: Callable[[np.ndarray], float], value: np.ndarray, gradient: np.ndarray, direction: np.ndarray
) -> None:
    """Assert that a gradient in float64 has the slope of the loss at `value` along `direction`."""
    ends = [float(loss(value + sign * STEP * direction)) for sign in (1, -1)]
    slope = (ends[0] - ends[1]) / (2 * STEP)
    scale = max(1.0, float(np.abs(gradient).sum()))
    assert abs(slope - float((gradient * direction).sum())) <= FINITE_DIFFERENCE * scale


def settled_slope(
    at: Callable[[float], float], step: float, *, middle: float, part: float, settled: float
) -> float | None:
    """Return the slope of a function of one number at 0, or None near a kink.

    Args:
        at: the function.
        step: of the central difference; another one at four times the step has to agree.
        middle: the function at 0.
        part: of `middle`, which counts as the size of the slope, as sums may cancel.
        settled: how far the two differences may be apart, as a part of that size. The slopes to both sides may be a
            twentieth of it apart.
    """
    right, left = at(step), at(-step)
    near, far = (right - left) / (2 * step), (at(4 * step) - at(-4 * step)) / (8 * step)
    size = abs(near) + part * abs(middle) + 1e-2
    sides = abs((right - middle) - (middle - left)) / step
    # Not "greater": NaN is no slope, either.
    return near if abs(near - far) <= settled * size and sides <= 5e-2 * size else None
