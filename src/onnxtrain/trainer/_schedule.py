"""The learning rate over a fit: a schedule behind its warm-up."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from onnxtrain._words import argument
from onnxtrain.errors import InputError
from onnxtrain.schedules import SCHEDULES, Constant, Schedule

ScheduleFunction = Callable[[int, int], float]
"""(optimizer steps taken in this fit, steps of the whole fit) -> factor of the learning rate."""

ScheduleSpec = str | Schedule | ScheduleFunction


@dataclass(frozen=True)
class Curve:
    """A schedule, preceded by a linear rise over `warmup_steps` steps, or over `warmup_ratio` of all."""

    schedule: Schedule | ScheduleFunction
    warmup_steps: int = 0
    warmup_ratio: float = 0.0

    def __call__(self, step: int, total: int | None, epoch: int = 0) -> float:
        """Returns the factor of the learning rate.

        Args:
            step: optimizer steps taken before this one.
            total: steps of the whole schedule; None if that is not known.
            epoch: epochs finished before this step.

        Raises:
            InputError: The schedule gives no factor, or needs to know the number of all steps.
        """
        if total is None and (self.warmup_ratio or self._needs_total):
            raise InputError(
                "The schedule depends on the number of all steps, which is not known for data without a length. Pass "
                "steps_per_epoch=... to fit, total_steps=... to the Trainer, or a schedule that does not ('constant', "
                "'step', 'exponential')."
            )
        warmup = self.warmup_steps or math.ceil(self.warmup_ratio * (total or 0))
        rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
        if not isinstance(self.schedule, Schedule) or self.schedule.after_warmup:
            if step < warmup:
                return rise
            step, total = step - warmup, max(1, (total or 0) - warmup)
        return rise * self._factor(step, total or 0, epoch)

    @property
    def _needs_total(self) -> bool:
        return not isinstance(self.schedule, Schedule) or self.schedule.needs_total

    def _factor(self, step: int, total: int, epoch: int) -> float:
        if isinstance(self.schedule, Schedule):
            factor = self.schedule(step, total, epoch)
        else:
            factor = self.schedule(step, total)
        if not isinstance(factor, numbers.Real) or not 0 <= factor < math.inf:
            raise InputError(
                f"The schedule gave {factor!r} for (step, total_steps) = {(step, total)}; it must give a number "
                ">= 0, the factor of the learning rate."
            )
        return float(factor)


def make_schedule(spec: ScheduleSpec | None, warmup_steps: int = 0, warmup_ratio: float = 0.0) -> Curve:
    """Returns a schedule, preceded by a linear rise from 1 / warmup_steps over `warmup_steps` steps.

    >>> schedule = make_schedule("linear", warmup_steps=2)
    >>> [schedule(step, 6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]

    Raises:
        InputError: The name is unknown, or the warm-up is negative or given twice.
    """
    if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
        raise InputError(
            f"Choosing a schedule: {argument('warmup_steps')} must be an integer >= 0, received {warmup_steps!r}."
        )
    if not isinstance(warmup_ratio, int | float) or not 0 <= warmup_ratio <= 1:
        raise InputError(
            f"Choosing a schedule: {argument('warmup_ratio')} must be a number from 0 to 1, received {warmup_ratio!r}."
        )
    if warmup_steps and warmup_ratio:
        raise InputError(
            f"Choosing a schedule: pass {argument('warmup_steps')} or {argument('warmup_ratio')}, not both."
        )
    if isinstance(spec, str):
        spec = named_schedule(spec)
    if isinstance(spec, type) or (spec is not None and not callable(spec)):
        raise InputError(
            "Choosing a schedule: expected a name, a schedule such as onnxtrain.schedules.Cosine(), or a function "
            f"(step, total_steps) -> factor, received {spec!r}."
        )
    return Curve(Constant() if spec is None else spec, warmup_steps, float(warmup_ratio))


def named_schedule(name: str, parameters: Mapping[str, Any] | None = None) -> Schedule:
    """Returns the schedule of a name, with parameters or the default ones.

    Raises:
        InputError: The name or a parameter is unknown, or a value is not allowed.
    """
    if name not in SCHEDULES:
        raise InputError(
            f"Choosing a schedule: {name!r} is unknown; choose from {', '.join(SCHEDULES)}, or pass a "
            "function (step, total_steps) -> factor. What follows a plateau is a callback, ReduceLROnPlateau."
        )
    kind, given = SCHEDULES[name], dict(parameters or {})
    known = [entry.name for entry in dataclasses.fields(kind)]
    if unknown := sorted(set(given) - set(known)):
        raise InputError(
            f"Choosing a schedule: {name!r} has no parameter {', '.join(unknown)}; it has "
            f"{', '.join(known) or 'none'}."
        )
    try:
        return kind(**given)
    except TypeError as error:  # a text where a number belongs
        raise InputError(f"Choosing a schedule: {name!r} with {given}: {error}.") from error


def describe_schedule(spec: ScheduleSpec | None) -> tuple[str | None, dict[str, Any]] | None:
    """Returns name and parameters, by which a schedule can be made again; None for a function."""
    if spec is None:
        return None, {}
    schedule = named_schedule(spec) if isinstance(spec, str) else spec
    for name, kind in SCHEDULES.items():
        if type(schedule) is kind:
            return name, dataclasses.asdict(schedule)
    return None
