"""Finite differences of a loss along random directions, beside its gradient."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Loss = Callable[[Mapping[str, Array]], float]
"""The loss with these parameters in place of those of the file."""

GROUPS, FEW_GROUPS, SLOW_SECONDS = 12, 3, 0.1
"""Every parameter is in one direction; where there are more parameters, some share one, more of them in slow files."""
STEPS = {
    "float64": (1e-4, 1e-5, 1e-6, 1e-7),
    "float32": (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4),
}
TOLERANCE = {"float64": 2e-3, "float32": 5e-2}
"""Of a slope, relative to what its terms come to in a random direction."""
UNSETTLED = 0.05
"""If two steps give slopes further apart than this, differences tell nothing."""


@dataclass(frozen=True)
class Slope:
    """A slope by the gradient and by differences.

    Attributes:
        names: the parameters that change.
        error: how far the two are apart, relative to what the terms come to in a random direction; at a kink, how far
            the gradient's is from all that lie between the slopes to both sides.
        spread: the same between the two steps that agree best.
        allowed: the largest error that is none.
        kink: whether the slopes to both sides are not the same, as where a quantized value is the 0 of a Relu.
    """

    names: Sequence[str]
    error: float
    spread: float
    allowed: float
    kink: bool = False

    @property
    def verdict(self) -> str:
        """right, wrong or unsettled."""
        if self.error <= self.allowed:
            return "right"
        return "unsettled" if self.spread > UNSETTLED or self.kink else "wrong"


def groups_of(names: Sequence[str], most: int, rng: np.random.Generator) -> list[list[str]]:
    """Returns the names in groups, each name in one of them."""
    mixed = [names[i] for i in rng.permutation(len(names))]
    return [mixed[i::most] for i in range(min(most, len(mixed)))]


def slopes(
    loss: Loss,
    parameters: Mapping[str, Array],
    gradients: Mapping[str, Array],
    precision: str,
    rng: np.random.Generator,
) -> list[Slope]:
    """Returns a slope for each group of parameters; together they are all."""
    start = time.perf_counter()
    size = abs(loss(parameters))
    most = GROUPS if time.perf_counter() - start < SLOW_SECONDS else FEW_GROUPS
    found = []
    for names in groups_of(list(gradients), most, rng):
        direction = {name: _direction(parameters[name], rng) for name in names}
        found.append(_slope(loss, parameters, gradients, direction, precision, size))
    return found


def _direction(value: Array, rng: np.random.Generator) -> Array:
    """Steps that are relative to the size of the values, and no smaller than a hundredth."""
    wide = value.astype(np.float64)
    scale = max(float(np.sqrt(np.mean(wide**2))) if wide.size else 0.0, 1e-2)
    # Scales and variances are positive, and must stay so.
    return scale * np.clip(rng.standard_normal(value.shape), -2.0, 2.0)


def _slope(
    loss: Loss,
    parameters: Mapping[str, Array],
    gradients: Mapping[str, Array],
    direction: Mapping[str, Array],
    precision: str,
    size: float,
) -> Slope:
    def at(step: float) -> float:
        return loss({**parameters, **{n: parameters[n] + step * d for n, d in direction.items()}})

    wide = {name: gradients[name].astype(np.float64) for name in direction}
    derivative = float(sum((wide[n] * d).sum() for n, d in direction.items()))
    terms = np.sqrt(sum(float(((wide[n] * d) ** 2).sum()) for n, d in direction.items()))
    # Of a gradient of zero, a constant in front of a softmax for one, rounding is all that differences see.
    terms = max(terms, abs(derivative), size * (1e-6 if precision == "float64" else 1e-3), 1e-12)
    steps = STEPS[precision]
    found = [(at(step) - at(-step)) / (2 * step) for step in steps]
    rounding = [float(np.finfo(precision).eps) * size / step for step in steps]
    pairs = [
        (abs(a - b) + r, (a, b))
        for a, b, r in zip(found, found[1:], rounding[1:], strict=False)
        if np.isfinite(a - b)
    ]
    if not pairs:
        return Slope(list(direction), float("inf"), float("inf"), 0.0)
    spread, (first, second) = min(pairs)
    error = min(abs(derivative - first), abs(derivative - second)) / terms
    digits = max(float(ml_dtypes.finfo(gradients[name].dtype).eps) for name in direction)
    allowed = min(TOLERANCE[precision] + 20 * digits + 3 * spread / terms, 0.2)
    kink = False
    if error > allowed:
        here = at(0.0)
        # Ties that float64 breaks by rounding are ones at larger steps only; those of float32 are too large to tell.
        for step, r in list(zip(steps, rounding, strict=True))[-4 if precision == "float64" else -2 :]:
            sides = (at(step) - here) / step, (here - at(-step)) / step
            if abs(sides[0] - sides[1]) > allowed * terms + 10 * r:
                kink = True
                error = min(error, abs(derivative - np.clip(derivative, min(sides), max(sides))) / terms)
    return Slope(list(direction), float(error), float(spread / terms), float(allowed), kink)
