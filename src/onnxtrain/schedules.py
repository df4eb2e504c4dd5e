"""Learning rate schedules: factors of the learning rate for each optimizer step.

A schedule is a function of the position in a fit, so a resumed run follows the same curve. The schedules of this
module are dataclasses: their parameters are saved with the run. :data:`SCHEDULES` names them for
`Trainer(scheduler="cosine")`, which uses their default parameters.

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
    """Base class of schedules. For a schedule of your own with parameters, subclass it as a frozen dataclass.

    Attributes:
        after_warmup: True if the curve begins after the warm-up. Other curves are counted from the
            first step and multiplied by the rise of the warm-up.
        needs_total: True if the curve depends on the number of all steps.
    """

    after_warmup: ClassVar[bool] = True
    # Class variables, not fields: they belong to the kind of curve and are not saved with a run.
    needs_total: ClassVar[bool] = True

    def __call__(self, step: int, total: int, epoch: int = 0) -> float:
        """Returns the factor of the learning rate.

        Args:
            step: optimizer steps taken before this one.
            total: steps of the whole schedule.
            epoch: epochs finished before this step.
        """
        raise NotImplementedError

    # A frozen dataclass cannot be repaired after it is made: a wrong parameter is refused by its constructor.
    def _require(self, condition: bool, expected: str) -> None:
        if not condition:
            raise InputError(f"Choosing a schedule: expected {expected}, received {self}.")


@dataclass(frozen=True)
class Constant(Schedule):
    """Keeps the learning rate constant; with a warm-up, after it."""

    needs_total = False

    def __call__(self, step: int, total: int, epoch: int = 0) -> float:
        """Returns 1."""
        return 1.0


@dataclass(frozen=True)
class Linear(Schedule):
    """Falls linearly from 1 to `end_factor`: `1 - (1 - end_factor) step / total`.

    Attributes:
        end_factor: factor at the end, e.g. 0.1.
    """

    end_factor: float = 0.0

    def __post_init__(self) -> None:
        self._require(self.end_factor >= 0, "end_factor >= 0")

    def __call__(self, step: int, total: int, epoch: int = 0) -> float:
        """Returns the factor."""
        return self.end_factor + (1.0 - self.end_factor) * (1.0 - _part(step, total))


@dataclass(frozen=True)
class Cosine(Schedule):
    """Falls from 1 to `end_factor` along half a cosine: `(1 + cos(pi step / total)) / 2` if `end_factor` is 0.

    Attributes:
        end_factor: factor at the end, e.g. 0.1.
    """

    end_factor: float = 0.0

    def __post_init__(self) -> None:
        self._require(self.end_factor >= 0, "end_factor >= 0")

    def __call__(self, step: int, total: int, epoch: int = 0) -> float:
        """Returns the factor."""
        return self.end_factor + (1.0 - self.end_factor) * _half_cosine(_part(step, total))


@dataclass(frozen=True)
class CosineWithRestarts(Schedule):
    """Falls along half a cosine, `cycles` times over: it jumps back to 1 between them.

    As `get_cosine_with_hard_restarts_schedule_with_warmup` of transformers.

    Attributes:
        cycles: number of falls.
    """

    cycles: int = 2

    def __post_init__(self) -> None:
        # A fraction of a cycle would end in the middle of a fall.
        self._require(isinstance(self.cycles, int) and self.cycles >= 1, "cycles >= 1")

    def __call__(self, step: int, total: int, epoch: int = 0) -> float:
        """Returns the factor."""
        # The remainder of the last step is 0, where a new cycle would begin at 1.
        return 0.0 if step >= total else _half_cosine((self.cycles * step / total) % 1.0)


@dataclass(frozen=True)
class Polynomial(Schedule):
    """Falls from 1 to `end_factor` as `(1 - step / total) ** power`.

    Attributes:
        power: exponent; 1 is a straight line.
        end_factor: factor at the end, e.g. 0.1.
    """

    power: float = 1.0
    end_factor: float = 0.0

    def __post_init__(self) -> None:
        self._require(self.power > 0 and self.end_factor >= 0, "power > 0 and end_factor >= 0")

    def __call__(self, step: int, total: int, epoch: int = 0) -> float:
        """Returns the factor."""
        left = 1.0 - _part(step, total)
        return float(self.end_factor + (1.0 - self.end_factor) * left**self.power)


@dataclass(frozen=True)
class Step(Schedule):
    """Multiplies by `gamma` after every `step_size` epochs, as PyTorch's `StepLR`; or steps, with `unit="step"`.

    Attributes:
        step_size: epochs (or steps) between two changes, e.g. 10.
        gamma: factor of each change, e.g. 0.1.
        unit: "epoch" or "step".
    """

    step_size: int = 10
    gamma: float = 0.1
    unit: Unit = "epoch"
    after_warmup = False
    needs_total = False

    def __post_init__(self) -> None:
        # True is an integer in Python.
        is_integer = isinstance(self.step_size, int) and not isinstance(self.step_size, bool)
        self._require(
            is_integer and self.step_size >= 1 and self.gamma > 0 and self.unit in get_args(Unit),
            "an integer step_size >= 1, gamma > 0 and unit 'epoch' or 'step'",
        )

    def __call__(self, step: int, total: int, epoch: int = 0) -> float:
        """Returns the factor."""
        return _power(self.gamma, (epoch if self.unit == "epoch" else step) // self.step_size)


@dataclass(frozen=True)
class MultiStep(Schedule):
    """Multiplies by `gamma` at each of the `milestones`: epochs, as PyTorch's `MultiStepLR`, or steps.

    Attributes:
        milestones: epochs (or steps) of the changes, rising, e.g. [30, 60].
        gamma: factor of each change, e.g. 0.1.
        unit: "epoch" or "step".
    """

    milestones: list[int] = field(default_factory=list)
    gamma: float = 0.1
    unit: Unit = "epoch"
    after_warmup = False
    needs_total = False

    def __post_init__(self) -> None:
        # A run saves lists: a tuple would not be equal after it is resumed.
        object.__setattr__(self, "milestones", list(self.milestones))
        rising = all(isinstance(m, int) and m >= 0 for m in self.milestones)
        rising = rising and self.milestones == sorted(self.milestones) and bool(self.milestones)
        self._require(
            rising and self.gamma > 0 and self.unit in get_args(Unit),
            "milestones that rise, such as [30, 60], gamma > 0 and unit 'epoch' or 'step'",
        )

    def __call__(self, step: int, total: int, epoch: int = 0) -> float:
        """Returns the factor."""
        # The step at a milestone has the lower rate already, as in PyTorch.
        passed = bisect.bisect_right(self.milestones, epoch if self.unit == "epoch" else step)
        return _power(self.gamma, passed)


@dataclass(frozen=True)
class Exponential(Schedule):
    """Multiplies by `gamma` after each epoch, as PyTorch's `ExponentialLR`; or step, with `unit="step"`.

    Attributes:
        gamma: factor of each epoch (or step), e.g. 0.9.
        unit: "epoch" or "step".
    """

    gamma: float = 0.9
    unit: Unit = "epoch"
    after_warmup = False
    needs_total = False

    def __post_init__(self) -> None:
        self._require(self.gamma > 0 and self.unit in get_args(Unit), "gamma > 0 and unit 'epoch' or 'step'")

    def __call__(self, step: int, total: int, epoch: int = 0) -> float:
        """Returns the factor."""
        return _power(self.gamma, epoch if self.unit == "epoch" else step)


@dataclass(frozen=True)
class OneCycle(Schedule):
    """Rises from `1 / div_factor` to 1, then falls to `1 / (div_factor * final_div_factor)`, along half cosines.

    As PyTorch's `OneCycleLR` for the learning rate; the momentum stays. The rise over `pct_start` of all steps is its
    warm-up.

    Attributes:
        pct_start: fraction of all steps that the rate rises, e.g. 0.3.
        div_factor: highest rate divided by the first one.
        final_div_factor: first rate divided by the last one.
        anneal: "cos" for half cosines, "linear" for straight lines.
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
        """Returns the factor."""
        first = 1.0 / self.div_factor
        # Not by the product of both, which can be rounded to zero.
        last = first / self.final_div_factor
        # PyTorch counts steps from 0 and places the peak at pct_start * total - 1.
        peak, end = self.pct_start * total - 1.0, total - 1.0
        if step <= peak:
            return self._between(first, 1.0, step / peak if peak > 0 else 1.0)
        return self._between(1.0, last, (min(step, end) - peak) / (end - peak) if end > peak else 1.0)

    def _between(self, start: float, end: float, part: float) -> float:
        """Moves from `start` to `end` while `part` rises from 0 to 1."""
        left = _half_cosine(part) if self.anneal == "cos" else 1.0 - part
        return end + (start - end) * left


def _part(step: int, total: int) -> float:
    """Returns the part of the schedule that is over, from 0 to 1."""
    # A fit may go on beyond the end of the schedule (`total_steps` too small): the factor stays.
    return min(1.0, step / total) if total > 0 else 1.0


def _power(base: float, exponent: int) -> float:
    """Returns base ** exponent, infinity where that is no float."""
    try:
        return float(base) ** exponent
    except OverflowError:
        return math.inf


def _half_cosine(part: float) -> float:
    """Returns a value that falls from 1 to 0 along half a cosine while `part` rises from 0 to 1."""
    return 0.5 * (1.0 + math.cos(math.pi * part))


# The names are stored in runs and are choices of the command line, so they must not change.
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
"""Schedule per name that `Trainer(scheduler=...)` takes."""
