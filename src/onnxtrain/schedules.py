"""Learning rate schedules: a learning rate factor for each optimizer step.

A schedule is a function of the position in the training run, so a resumed run follows the same curve. The schedules in
this module are dataclasses whose parameters are saved with the run. :data:`SCHEDULES` maps names to schedules with
default parameters, for `Trainer(scheduler="cosine")`.

>>> from onnxtrain.schedules import Step
>>> [Step(step_size=2, gamma=0.5)(step=10 * epoch, total=60, epoch=epoch) for epoch in range(6)]
[1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from onnxtrain.errors import InputError

__all__ = [
    "SCHEDULES",
    "Constant",
    "Cosine",
    "CosineWithRestarts",
    "Exponential",
    "Linear",
    "MultiStep",
    "OneCycle",
    "Polynomial",
    "Schedule",
    "Step",
]

Unit = Literal["epoch", "step"]


@dataclass(frozen=True)
class Schedule:
    """Base class for schedules. To define a schedule with parameters, subclass it as a frozen dataclass.

    Attributes:
        after_warmup: True if the curve begins after the warm-up. Otherwise, the curve begins at the first step and is
            multiplied by the warm-up factor.
        needs_total: True if the curve depends on the total number of steps.
    """

    after_warmup: ClassVar[bool] = True
    # Class variables rather than fields: they belong to the kind of curve, and are not saved with a run.
    needs_total: ClassVar[bool] = True

    def __call__(self, step: int, total: int, epoch: int = 0) -> float:
        """Returns the learning rate factor.

        Args:
            step: number of optimizer steps taken so far.
            total: total number of steps of the schedule.
            epoch: number of epochs finished so far.
        """
        raise NotImplementedError

    # Checked in the constructor, because a frozen dataclass cannot be corrected afterwards.
    def _require(self, condition: bool, expected: str) -> None:
        if not condition:
            raise InputError(f"Choosing a schedule: expected {expected}, received {self}.")


@dataclass(frozen=True)
class Constant(Schedule):
    """Keeps the learning rate constant, after the warm-up if there is one."""

    needs_total = False

    def __call__(self, step: int, total: int, epoch: int = 0) -> float:
        """Returns 1."""
        return 1.0


@dataclass(frozen=True)
class Linear(Schedule):
    """Lowers the factor linearly from 1 to `end_factor`: `1 - (1 - end_factor) * step / total`.

    Attributes:
        end_factor: factor at the end, e.g. 0.1.
    """

    end_factor: float = 0.0

    def __post_init__(self) -> None:
        self._require(self.end_factor >= 0, "end_factor >= 0")

    def __call__(self, step: int, total: int, epoch: int = 0) -> float:
        """Returns the learning rate factor."""
        return self.end_factor + (1.0 - self.end_factor) * (1.0 - _elapsed(step, total))


@dataclass(frozen=True)
class Cosine(Schedule):
    """Lowers the factor from 1 to `end_factor` along half a cosine.

    If `end_factor` is 0, the factor is `(1 + cos(pi * step / total)) / 2`.

    Attributes:
        end_factor: factor at the end, e.g. 0.1.
    """

    end_factor: float = 0.0

    def __post_init__(self) -> None:
        self._require(self.end_factor >= 0, "end_factor >= 0")

    def __call__(self, step: int, total: int, epoch: int = 0) -> float:
        """Returns the learning rate factor."""
        return self.end_factor + (1.0 - self.end_factor) * _half_cosine(_elapsed(step, total))


@dataclass(frozen=True)
class CosineWithRestarts(Schedule):
    """Lowers the factor from 1 to 0 along half a cosine, `cycles` times, jumping back to 1 in between.

    The curve is the same as that of `get_cosine_with_hard_restarts_schedule_with_warmup` in transformers.

    Attributes:
        cycles: number of cycles, e.g. 2.
    """

    cycles: int = 2

    def __post_init__(self) -> None:
        # A fractional cycle would end in the middle of its fall.
        self._require(isinstance(self.cycles, int) and self.cycles >= 1, "cycles >= 1")

    def __call__(self, step: int, total: int, epoch: int = 0) -> float:
        """Returns the learning rate factor."""
        # At the last step, the remainder is 0, which would be the beginning of a new cycle.
        return 0.0 if step >= total else _half_cosine((self.cycles * step / total) % 1.0)


@dataclass(frozen=True)
class Polynomial(Schedule):
    """Lowers the factor from 1 to `end_factor` polynomially: `(1 - step / total) ** power` if `end_factor` is 0.

    Attributes:
        power: exponent; 1 is a straight line.
        end_factor: factor at the end, e.g. 0.1.
    """

    power: float = 1.0
    end_factor: float = 0.0

    def __post_init__(self) -> None:
        self._require(self.power > 0 and self.end_factor >= 0, "power > 0 and end_factor >= 0")

    def __call__(self, step: int, total: int, epoch: int = 0) -> float:
        """Returns the learning rate factor."""
        left = 1.0 - _elapsed(step, total)
        return float(self.end_factor + (1.0 - self.end_factor) * left**self.power)


@dataclass(frozen=True)
class Step(Schedule):
    """Multiplies the learning rate by `gamma` every `step_size` epochs (like PyTorch's `StepLR`) or steps.

    Attributes:
        step_size: number of epochs (or steps) between changes, e.g. 10.
        gamma: factor by which the rate is multiplied each time, e.g. 0.1.
        unit: "epoch" or "step", the unit of `step_size`.
    """

    step_size: int = 10
    gamma: float = 0.1
    unit: Unit = "epoch"
    after_warmup = False
    needs_total = False

    def __post_init__(self) -> None:
        # In Python, True is an integer.
        is_integer = isinstance(self.step_size, int) and not isinstance(self.step_size, bool)
        self._require(
            is_integer and self.step_size >= 1 and self.gamma > 0 and self.unit in get_args(Unit),
            "an integer step_size >= 1, gamma > 0 and unit 'epoch' or 'step'",
        )

    def __call__(self, step: int, total: int, epoch: int = 0) -> float:
        """Returns the learning rate factor."""
        return _power(self.gamma, (epoch if self.unit == "epoch" else step) // self.step_size)


@dataclass(frozen=True)
class MultiStep(Schedule):
    """Multiplies the learning rate by `gamma` at each of the `milestones`, like PyTorch's `MultiStepLR`.

    Attributes:
        milestones: epochs (or steps) at which the rate changes, in increasing order, e.g. [30, 60].
        gamma: factor by which the rate is multiplied each time, e.g. 0.1.
        unit: "epoch" or "step", the unit of the milestones.
    """

    milestones: list[int] = field(default_factory=list)
    gamma: float = 0.1
    unit: Unit = "epoch"
    after_warmup = False
    needs_total = False

    def __post_init__(self) -> None:
        # A list, because a run saves lists, and a tuple would not be equal to the restored list.
        object.__setattr__(self, "milestones", list(self.milestones))
        rising = all(isinstance(m, int) and m >= 0 for m in self.milestones)
        rising = rising and self.milestones == sorted(self.milestones) and bool(self.milestones)
        self._require(
            rising and self.gamma > 0 and self.unit in get_args(Unit),
            "milestones that rise, such as [30, 60], gamma > 0 and unit 'epoch' or 'step'",
        )

    def __call__(self, step: int, total: int, epoch: int = 0) -> float:
        """Returns the learning rate factor."""
        # The step at a milestone already has the lower rate, as in PyTorch.
        passed = bisect.bisect_right(self.milestones, epoch if self.unit == "epoch" else step)
        return _power(self.gamma, passed)


@dataclass(frozen=True)
class Exponential(Schedule):
    """Multiplies the learning rate by `gamma` after each epoch, like PyTorch's `ExponentialLR`, or after each step.

    Attributes:
        gamma: factor per epoch (or step), e.g. 0.9.
        unit: "epoch" or "step".
    """

    gamma: float = 0.9
    unit: Unit = "epoch"
    after_warmup = False
    needs_total = False

    def __post_init__(self) -> None:
        self._require(self.gamma > 0 and self.unit in get_args(Unit), "gamma > 0 and unit 'epoch' or 'step'")

    def __call__(self, step: int, total: int, epoch: int = 0) -> float:
        """Returns the learning rate factor."""
        return _power(self.gamma, epoch if self.unit == "epoch" else step)


@dataclass(frozen=True)
class OneCycle(Schedule):
    """Raises the factor from `1 / div_factor` to 1, then lowers it to `1 / (div_factor * final_div_factor)`.

    The learning rate is the same as with PyTorch's `OneCycleLR`; the momentum does not change. The rise replaces a
    warm-up.

    Attributes:
        pct_start: fraction of all steps during which the rate rises, e.g. 0.3.
        div_factor: ratio of the highest rate to the first.
        final_div_factor: ratio of the first rate to the last.
        anneal: shape of the rise and the fall: "cos" for half cosines, "linear" for straight lines.
    """

    pct_start: float = 0.3
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    anneal: Literal["cos", "linear"] = "cos"

    def __post_init__(self) -> None:
        self._require(
            0 <= self.pct_start <= 1
            and min(self.div_factor, self.final_div_factor) > 0
            and self.anneal in ("cos", "linear"),
            "0 <= pct_start <= 1, div_factor and final_div_factor > 0 and anneal 'cos' or 'linear'",
        )

    def __call__(self, step: int, total: int, epoch: int = 0) -> float:
        """Returns the learning rate factor."""
        first = 1.0 / self.div_factor
        # Dividing twice, because the product of both factors could make the quotient underflow to zero.
        last = first / self.final_div_factor
        # PyTorch counts steps from 0 and places the peak at pct_start * total - 1.
        peak, end = self.pct_start * total - 1.0, total - 1.0
        if step <= peak:
            return self._interpolate(first, 1.0, step / peak if peak > 0 else 1.0)
        return self._interpolate(1.0, last, (min(step, end) - peak) / (end - peak) if end > peak else 1.0)

    def _interpolate(self, start: float, end: float, part: float) -> float:
        """Interpolates between `start` (`part` = 0) and `end` (`part` = 1) along the curve of `anneal`."""
        left = _half_cosine(part) if self.anneal == "cos" else 1.0 - part
        return end + (start - end) * left


def _elapsed(step: int, total: int) -> float:
    """Returns the fraction of a schedule with `total` steps that has elapsed after `step` steps, from 0 to 1."""
    # If training continues after the end of the schedule (`total_steps` too small), the factor stays constant.
    return min(1.0, step / total) if total > 0 else 1.0


def _power(base: float, exponent: int) -> float:
    """Returns base ** exponent, or infinity if that overflows."""
    try:
        return float(base) ** exponent
    except OverflowError:
        return math.inf


def _half_cosine(part: float) -> float:
    """Returns a value that falls from 1 to 0 along half a cosine as `part` rises from 0 to 1."""
    return 0.5 * (1.0 + math.cos(math.pi * part))


# These names are stored in runs and are choices of the command line, so they must not change.
SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "cosine_with_restarts": CosineWithRestarts,
    "polynomial": Polynomial,
    "step": Step,
    "multistep": MultiStep,
    "exponential": Exponential,
    "one_cycle": OneCycle,
}
"""Schedules by name, for `Trainer(scheduler=...)`."""
