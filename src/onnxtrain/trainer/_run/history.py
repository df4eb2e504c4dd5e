"""Records the loss, the metrics and the duration of each epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from onnxtrain.errors import InputError
from onnxtrain.trainer._optional import optional

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


def best_index(values: Sequence[float], *, rises: bool, min_delta: float = 0.0) -> int:
    """Returns the index of the best epoch, for early stopping and for restoring its parameters.

    An epoch replaces the best epoch so far if its value is better by more than `min_delta`.

    Args:
        values: one value per epoch; NaN is the worst value.
        rises: True if higher values are better.
        min_delta: only changes greater than this count as an improvement.

    >>> best_index([0.5, 0.3, math.nan, 0.3], rises=False)
    1
    """
    scores = [-math.inf if math.isnan(value) else value if rises else -value for value in values]
    best = 0
    for index, score in enumerate(scores):
        if score > scores[best] + min_delta:
            best = index
    return best


@dataclass
class History:
    """Record of a training run: one entry per finished epoch.

    Attributes:
        epochs: one dict per epoch: `epoch` (counted from 1), `loss`, metrics, their validation values with the prefix
            `val_`, and `learning_rate` at the epoch's last step.
        evaluations: one dict per evaluation in the middle of an epoch (`evaluate_every`): `step` (optimizer steps over
            all fits), `epoch` (the current epoch, counted from 1), and the loss and metrics with the prefix `val_`.
        stopped: why the last fit ended before its last epoch: "early" (stopped by a callback) or "interrupted"
            (Ctrl-C); None if it was completed.
        seconds: duration of each epoch in seconds, including validation.
        samples_per_second: training throughput of each epoch, excluding validation.

    >>> history = History([{"epoch": 1, "loss": 0.7}, {"epoch": 2, "loss": 0.4}])
    >>> history["loss"], history.last["loss"], len(history)
    ([0.7, 0.4], 0.4, 2)
    """

    epochs: list[dict[str, float]] = field(default_factory=list)
    stopped: str | None = None
    evaluations: list[dict[str, float]] = field(default_factory=list)
    # Excluded from comparison: a resumed run has the same history as an uninterrupted one, except for durations.
    seconds: list[float] = field(default_factory=list, compare=False)
    samples_per_second: list[float] = field(default_factory=list, compare=False)

    def __getitem__(self, key: str) -> list[float]:
        """Returns the values of one key, one per epoch.

        Raises:
            KeyError: no epoch recorded the key.
        """
        # Epochs of earlier fits may lack the key, e.g. if there was no validation data.
        values = [epoch[key] for epoch in self.epochs if key in epoch]
        if not values:
            raise KeyError(f"{key} was not recorded; recorded: {', '.join(self.keys()) or 'no epochs yet'}")
        return values

    def __contains__(self, key: object) -> bool:
        return any(key in epoch for epoch in self.epochs)

    def __iter__(self) -> Iterator[dict[str, float]]:
        return iter(self.epochs)

    def __len__(self) -> int:
        return len(self.epochs)

    def keys(self) -> list[str]:
        """Returns the recorded keys, in order of first appearance."""
        return list(dict.fromkeys(key for epoch in self.epochs for key in epoch))

    @property
    def last(self) -> dict[str, float]:
        """Entry of the last finished epoch; empty before the first one."""
        return self.epochs[-1] if self.epochs else {}

    def plot(self, keys: Sequence[str] | None = None) -> Figure:
        """Plots the history with matplotlib: training and validation loss, metrics, and the learning rate, per epoch.

        Notebooks display the figure; elsewhere, save it with `.savefig("history.png")`.

        Args:
            keys: keys to plot, without `val_`, e.g. ["loss"]; None plots all.

        Raises:
            InputError: there are no epochs, or a key was not recorded.
            MissingPackageError: matplotlib is not installed.
        """
        from onnxtrain.trainer._show.plots import plot_epochs

        shown = [key for key in self.keys() if key != "epoch" and not key.startswith("val_")]
        if not shown:
            raise InputError("There is nothing to plot: no epoch has been recorded.")
        if unknown := [key for key in keys or () if key not in shown]:
            raise InputError(f"{', '.join(unknown)} was not recorded; recorded: {', '.join(shown)}.")
        return plot_epochs(self.epochs, list(keys) if keys else shown)

    def to_frame(self) -> DataFrame:
        """Returns a pandas DataFrame with one row per epoch, indexed by epoch number, and one column per key.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        pandas = optional("pandas", "History.to_frame", "pandas, or 'onnxtrain[plots]'")
        frame: DataFrame = pandas.DataFrame(self.epochs, columns=self.keys() or ["epoch"])
        return frame.set_index("epoch")
