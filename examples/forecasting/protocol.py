"""What the desk and the device agree on: splits, windows, order of the batches, learning rate, errors. numpy only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BATCH, WARMUP = 32, 20
PARTS = ("train", "validation", "test")
BORDERS = (0.70, 0.85)  # the last 15 % are the test part, the 15 % before them the validation part


@dataclass(frozen=True)
class Task:
    """How a series is forecast; width, epochs and the optimizer's settings were chosen on the validation part."""

    context: int
    horizon: int
    period: int
    width: int
    epochs: int
    learning_rate: float
    weight_decay: float


TASKS = {
    "co2": Task(60, 24, 12, width=96, epochs=30, learning_rate=2e-3, weight_decay=0.01),
    "sunspots": Task(22, 11, 11, width=64, epochs=20, learning_rate=2e-3, weight_decay=0.1),
}
PERSONAL, BASE = "elnino", "co2"  # the personal series is forecast by the network of the base
TASKS[PERSONAL] = TASKS[BASE]
# What is trained on the device of the personal series: the last two layers and the scale and bias of RINorm.
PERSONAL_PREFIXES = ("head.", "lookback.", "norm.")


@dataclass(frozen=True)
class Series:
    """A series in its own units, with its times in years."""

    name: str
    title: str
    unit: str
    times: np.ndarray
    values: np.ndarray

    def save(self, path: Path) -> None:
        np.savez(path, **vars(self))

    @classmethod
    def load(cls, path: Path) -> Series:
        with np.load(path) as file:
            return cls(*(str(file[key]) for key in ("name", "title", "unit")), file["times"], file["values"])


class Windows:
    """Contexts and horizons of a series, standardised by mean and deviation of its training part.

    A window belongs to the part that its whole horizon lies in. Its context may reach back into the part
    before, which is known by then; no horizon is seen by an earlier part.
    """

    def __init__(self, series: Series, task: Task) -> None:
        self.series, self.task = series, task
        size = len(series.values)
        self.borders = [0, *(int(size * border) for border in BORDERS), size]
        known = series.values[: self.borders[1]]
        self.mean, self.deviation = float(known.mean()), float(known.std())
        self._known = known

    def starts(self, part: str) -> np.ndarray:
        """Index of the first month or year of each horizon, int [windows]."""
        index = PARTS.index(part)
        begin, end = self.borders[index : index + 2]
        return np.arange(max(begin, self.task.context), end - self.task.horizon + 1)

    def of(self, part: str) -> tuple[np.ndarray, np.ndarray]:
        """Contexts and horizons, standardised, float32 [windows, context or horizon, 1]."""
        values = ((self.series.values - self.mean) / self.deviation).astype(np.float32)[:, None]
        starts = self.starts(part)
        contexts = np.stack([values[start - self.task.context : start] for start in starts])
        return contexts, np.stack([values[start : start + self.task.horizon] for start in starts])

    def in_units(self, forecasts: np.ndarray) -> np.ndarray:
        """Undoes the standardisation, float64 [windows, horizon]."""
        return forecasts[..., 0].astype(np.float64) * self.deviation + self.mean

    def truth(self, part: str) -> np.ndarray:
        """What came, in the series' units, float64 [windows, horizon]."""
        return np.stack(
            [self.series.values[start : start + self.task.horizon] for start in self.starts(part)]
        )

    def seasonal_naive(self, part: str) -> np.ndarray:
        """Each step as one period (or as many as needed) before, in the series' units."""
        steps = np.arange(self.task.horizon) % self.task.period
        return np.stack([self.series.values[start - self.task.period + steps] for start in self.starts(part)])

    def errors(self, forecasts: np.ndarray, part: str) -> dict[str, float]:
        """MAE and RMSE in the series' units, and MASE: MAE over that of seasonal-naive in the training part."""
        difference = forecasts - self.truth(part)
        scale = np.abs(self._known[self.task.period :] - self._known[: -self.task.period]).mean()
        mae = float(np.abs(difference).mean())
        return {"MAE": mae, "RMSE": float(np.sqrt((difference**2).mean())), "MASE": mae / float(scale)}


def batches(count: int, epochs: int, seed: int) -> Iterator[np.ndarray]:
    """Indices of the windows of each batch, all of them once an epoch, in an order that the seed decides."""
    generator = np.random.default_rng(seed)
    for _ in range(epochs):
        yield from np.array_split(generator.permutation(count), steps_per_epoch(count))


def steps_per_epoch(count: int) -> int:
    return -(-count // BATCH)


def schedule(count: int, epochs: int) -> tuple[int, int]:
    """Steps in which the learning rate rises, and steps in all; after the first it falls to zero."""
    total = epochs * steps_per_epoch(count)
    return min(WARMUP, total // 4), total
