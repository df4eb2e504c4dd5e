"""Runs the learning rate range test (Smith 2017): measures the loss at increasing learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from onnxtrain.errors import InputError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.trainer._fit.freezing import Freezing
from onnxtrain.trainer._fit.snapshot import FiniteCheck, StatisticsBackup
from onnxtrain.trainer._fit.state import TrainingState
from onnxtrain.trainer.data import Pass, Source

if TYPE_CHECKING:
    from matplotlib.figure import Figure

START, STOP, STEPS = 1e-7, 10.0, 100
"""Default rates of the test: the lowest, the highest, and their number."""

_SMOOTHING = 0.98
# The test ends when the loss is this many times its lowest value.
_DIVERGED = 4.0

# Losses ignored for the suggestion: the first follow hardly any training, the last is diverging.
_SKIP_FIRST, _SKIP_LAST = 10, 1


@dataclass(frozen=True)
class LearningRateRange:
    """Result of a learning rate range test.

    Attributes:
        rates: learning rate of each step.
        losses: loss before each step, smoothed by a bias-corrected moving average with decay 0.98.
        suggestion: learning rate at which the smoothed loss fell fastest; None if too few steps were taken.
    """

    rates: list[float]
    losses: list[float]
    suggestion: float | None

    def plot(self) -> Figure:
        """Plots the smoothed loss against the learning rate with matplotlib, and marks the suggestion.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        from onnxtrain.trainer._show.plots import plot_range

        return plot_range(self.rates, self.losses, self.suggestion)


def find_range(
    state: TrainingState,
    data: Source,
    start: float,
    stop: float,
    steps: int,
    frozen_until: Mapping[str, int] | None = None,
) -> LearningRateRange:
    """Runs the learning rate range test, then restores the trainer's state.

    Args:
        state: the trainer's state.
        data: training data.
        start: learning rate of the first step.
        stop: learning rate of the last step.
        steps: number of steps. The test ends earlier if the loss diverges.
        frozen_until: see :class:`Freezing`; None for no frozen parameters.

    Raises:
        InputError: `start` and `stop` are not finite, positive and increasing, or `steps` is less than 2.
    """
    if not 0 < start < stop < math.inf or isinstance(steps, bool) or not isinstance(steps, int) or steps < 2:
        raise InputError(
            f"Finding a learning rate: expected 0 < start < stop and steps >= 2, received start={start!r}, "
            f"stop={stop!r}, steps={steps!r}."
        )
    rates = np.geomspace(start, stop, steps).tolist()
    # Other threads must not see the parameters of the test.
    with state.lock:
        snapshot, skipped = state.snapshot(), state.position.skipped
        try:
            losses = _losses(state, data, rates, Freezing(state, frozen_until or {}))
        finally:
            snapshot.restore(state.run.store)
            state.position.skipped = skipped
            state.run.store.gradients_valid = False
            state.run.module.lazy_reset_grad()
    return LearningRateRange(rates[: len(losses)], losses, suggest(rates[: len(losses)], losses))


def _losses(state: TrainingState, data: Source, rates: Sequence[float], freezing: Freezing) -> list[float]:
    """Takes one step at each learning rate until the loss diverges; returns the smoothed loss before each step."""
    smoothed: list[float] = []
    average, lowest = 0.0, math.inf
    batches, finite = _batches(state, data), FiniteCheck(state.run.store.all_gradients())
    statistics = StatisticsBackup(state.run.store)
    for rate in rates:
        arrays = next(batches)
        state.run.module.lazy_reset_grad()
        statistics.take()
        loss, _ = state.run.step(arrays, training=True)
        freezing.restore_statistics(statistics)
        freezing.clear_gradients()
        average = _SMOOTHING * average + (1.0 - _SMOOTHING) * loss
        # The average starts at 0; the division corrects the bias, as in Adam.
        value = average / (1.0 - _SMOOTHING ** (len(smoothed) + 1))
        if not math.isfinite(value) or (len(smoothed) > 1 and value > _DIVERGED * lowest > 0):
            break
        lowest = min(lowest, value)
        smoothed.append(value)
        # A step with NaN gradients would destroy the parameters; the losses so far are good.
        if not finite():
            break
        state.run.optimizer.set_learning_rate(rate)
        freezing.step()
    return smoothed


def _batches(state: TrainingState, data: Source) -> Iterator[list[Array]]:
    """Yields shuffled batches endlessly; skips batches whose labels are all ignored."""
    epoch = 0
    while True:
        counted = 0
        for arrays in data.read(Pass(state.position.seed, epoch, shuffle=True)):
            if state.loss_count(arrays) != 0:
                counted += 1
                yield arrays
        # Otherwise the generator would search for a batch forever.
        if not counted:
            raise InputError("Finding a learning rate: all labels of the data are ignored.")
        epoch += 1


def suggest(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Returns the rate at which the loss falls fastest with respect to the log of the rate; None if it never falls.

    >>> suggest([10.0**k for k in range(-15, 1)], [1.0] * 12 + [0.9, 0.5, 0.4, 0.9])
    0.001
    """
    inner = slice(_SKIP_FIRST, len(losses) - _SKIP_LAST)
    if len(losses[inner]) < 2:
        return None
    # The rates form a geometric series, so differences per index are slopes over the logarithm.
    slopes = np.gradient(np.asarray(losses)[inner])
    steepest = int(slopes.argmin())
    return float(rates[_SKIP_FIRST + steepest]) if slopes[steepest] < 0 else None
