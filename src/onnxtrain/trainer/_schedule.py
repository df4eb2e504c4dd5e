"""Learning rate schedules: functions of the step, so that a resumed run follows the same curve."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable

from onnxtrain.errors import InputError

__all__ = ["SCHEDULES", "Schedule", "make_schedule"]

Schedule = Callable[[int, int], float]
"""(optimizer steps taken in this fit, steps of the whole fit) -> factor of the learning rate."""


def linear(step: int, total: int) -> float:
    """Returns a factor that falls linearly from 1 to 0: `1 - step / total`."""
    return max(0.0, 1.0 - step / total)


def cosine(step: int, total: int) -> float:
    """Returns a factor that falls from 1 to 0 along half a cosine: `(1 + cos(pi step / total)) / 2`."""
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / total)))


SCHEDULES: dict[str, Schedule] = {"linear": linear, "cosine": cosine}
"""The schedules by the names that the trainer takes."""


def make_schedule(spec: str | Schedule | None, warmup_steps: int) -> Schedule:
    """Returns a schedule, preceded by a linear rise from 1 / warmup_steps over `warmup_steps` steps.

    >>> schedule = make_schedule("linear", warmup_steps=2)
    >>> [schedule(step, 6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]

    Raises:
        InputError: The name is unknown, or `warmup_steps` is negative; later, that a function gives no factor.
    """
    if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
        raise InputError(
            f"Choosing a schedule: warmup_steps must be an integer >= 0, received {warmup_steps!r}."
        )
    if isinstance(spec, str) and spec not in SCHEDULES:
        raise InputError(
            f"Choosing a schedule: {spec!r} is unknown; choose from {', '.join(SCHEDULES)}, or pass a "
            "function "
            "(step, total_steps) -> factor."
        )
    if spec is not None and not isinstance(spec, str) and not callable(spec):
        raise InputError(
            f"Choosing a schedule: expected a name or a function (step, total_steps) -> factor, received {spec!r}."
        )
    after: Schedule = SCHEDULES[spec] if isinstance(spec, str) else spec or (lambda step, total: 1.0)

    def schedule(step: int, total: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        arguments = step - warmup_steps, max(1, total - warmup_steps)
        factor = after(*arguments)
        if not isinstance(factor, numbers.Real) or not 0 <= factor < math.inf:
            raise InputError(
                f"The schedule gave {factor!r} for (step, total_steps) = {arguments}; it must give a number "
                ">= 0, the factor of the learning rate."
            )
        return float(factor)

    return schedule
