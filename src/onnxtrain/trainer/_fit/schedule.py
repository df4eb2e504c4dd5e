"""Computes the learning rate's factor for each step: a warm-up, then a schedule."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from onnxtrain._dialects import advice
from onnxtrain._words import argument
from onnxtrain.errors import InputError
from onnxtrain.schedules import SCHEDULES, Constant, Schedule
from onnxtrain.trainer._checks import check_integer

ScheduleFunction = Callable[[int, int], float]
"""`(step, total_steps) -> factor` of the learning rate; both count optimizer steps of the fit."""

ScheduleSpec = str | Schedule | ScheduleFunction


@dataclass(frozen=True)
class Curve:
    """Learning rate schedule with a linear warm-up.

    Attributes:
        schedule: schedule that starts after the warm-up. A schedule that counts epochs starts at the first step
            instead, and is multiplied by the warm-up factor.
        warmup_steps: number of warm-up steps; 0 if `warmup_ratio` determines it.
        warmup_ratio: length of the warm-up as a fraction of all steps, e.g. 0.1; 0 for no warm-up.
    """

    schedule: Schedule | ScheduleFunction
    warmup_steps: int = 0
    warmup_ratio: float = 0.0

    def __call__(self, step: int, total: int | None, epoch: int = 0) -> float:
        """Returns the factor by which to multiply the learning rate of a step.

        Args:
            step: number of optimizer steps taken before this one.
            total: number of steps of the whole schedule; None if unknown.
            epoch: number of epochs finished before this step.

        Raises:
            InputError: the schedule returned an invalid factor, or needs the total number of steps, which is unknown.
        """
        if total is None and (self.warmup_ratio or self._needs_total):
            raise InputError(
                "The schedule depends on the total number of steps, which is unknown for data without a "
                "length. Pass steps_per_epoch=... to fit, total_steps=... to the Trainer, or a schedule "
                "that does not need it ('constant', 'step', 'exponential')."
            )
        warmup = self.warmup_steps or math.ceil(self.warmup_ratio * (total or 0))
        # The warm-up starts at 1 / warmup: a first step at learning rate 0 would do nothing.
        rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
        # Schedules that end with the fit start after the warm-up. For those that count epochs, the warm-up would delay
        # every epoch, so it multiplies them instead.
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
                f"The schedule returned {factor!r} for (step, total_steps) = {(step, total)}; it must return a number "
                ">= 0, the factor of the learning rate."
            )
        return float(factor)


def make_schedule(spec: ScheduleSpec | None, warmup_steps: int = 0, warmup_ratio: float = 0.0) -> Curve:
    """Adds a linear warm-up to a schedule: over `warmup_steps` steps, the factor rises from 1 / warmup_steps to 1.

    Args:
        spec: a schedule, its name, or a function; None for a constant learning rate.
        warmup_steps: number of warm-up steps; 0 for no warm-up.
        warmup_ratio: length of the warm-up as a fraction of all steps, instead of `warmup_steps`.

    >>> schedule = make_schedule("linear", warmup_steps=2)
    >>> [schedule(step, 6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]

    Raises:
        InputError: the name is unknown, or the warm-up is invalid or given twice.
    """
    warmup_steps = check_integer(f"Choosing a schedule: {argument('warmup_steps')}", warmup_steps, 0)
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
    """Creates a schedule from its name and parameters.

    Raises:
        InputError: the name or a parameter is unknown, or a value is invalid.
    """
    if name not in SCHEDULES:
        meant = advice("scheduler", name, SCHEDULES)
        raise InputError(
            f"Choosing a schedule: {name!r} is unknown; {f'{meant}, or ' if meant else ''}choose from "
            f"{', '.join(SCHEDULES)}, or pass a "
            "function (step, total_steps) -> factor. To lower the learning rate on a plateau, use the "
            "callback ReduceLROnPlateau."
        )
    kind, values = SCHEDULES[name], dict(parameters or {})
    allowed = [entry.name for entry in dataclasses.fields(kind)]
    if unknown := sorted(set(values) - set(allowed)):
        raise InputError(
            f"Choosing a schedule: {name!r} has no parameter {', '.join(unknown)}; it has "
            f"{', '.join(allowed) or 'none'}."
        )
    try:
        return kind(**values)
    except TypeError as error:
        # Comparisons in __post_init__ raise TypeError for strings in place of numbers.
        raise InputError(f"Choosing a schedule: {name!r} with {values}: {error}.") from error


def describe_schedule(spec: ScheduleSpec | None) -> tuple[str | None, dict[str, Any]] | None:
    """Returns the name and parameters from which :func:`named_schedule` recreates a schedule; None for a function."""
    if spec is None:
        return None, {}
    schedule = named_schedule(spec) if isinstance(spec, str) else spec
    for name, kind in SCHEDULES.items():
        if type(schedule) is kind:
            return name, dataclasses.asdict(schedule)
    return None
