"""What a training run has recorded, epoch by epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from onnxtrain.errors import InputError
from onnxtrain.trainer._optional import optional

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass
class History:
    """The record of a training run: one entry per finished epoch.

    Attributes:
        epochs: for each epoch its `epoch` (counted from 1), `loss`, metrics, their validation values with the
            prefix `val_`, and the `learning_rate` of its last step.
        stopped: why training ended before its last epoch: "early" (a callback), "interrupted" (Ctrl-C) or
            None.
        seconds: duration of each epoch, validation included; not compared, as no two runs take the same time.
        samples_per_second: training rate of each epoch, without validation; not compared.

    >>> history = History([{"epoch": 1, "loss": 0.7}, {"epoch": 2, "loss": 0.4}])
    >>> history["loss"], history.last["loss"], len(history)
    ([0.7, 0.4], 0.4, 2)
    """

    epochs: list[dict[str, float]] = field(default_factory=list)
    stopped: str | None = None
    seconds: list[float] = field(default_factory=list, compare=False)
    samples_per_second: list[float] = field(default_factory=list, compare=False)

    def __getitem__(self, key: str) -> list[float]:
        """Returns the values of one key, one per epoch.

        Raises:
            KeyError: no epoch has recorded it.
        """
        values = [epoch[key] for epoch in self.epochs if key in epoch]
        if not values:
            raise KeyError(f"{key} was not recorded; there are {', '.join(self.keys()) or 'no epochs yet'}")
        return values

    def __contains__(self, key: object) -> bool:
        return any(key in epoch for epoch in self.epochs)

    def __iter__(self) -> Iterator[dict[str, float]]:
        return iter(self.epochs)

    def __len__(self) -> int:
        return len(self.epochs)

    def keys(self) -> list[str]:
        """Returns the recorded keys, in the order in which they appeared."""
        return list(dict.fromkeys(key for epoch in self.epochs for key in epoch))

    @property
    def last(self) -> dict[str, float]:
        """The entry of the last finished epoch; empty before the first one."""
        return self.epochs[-1] if self.epochs else {}

    def plot(self, keys: Sequence[str] | None = None) -> Figure:
        """Returns a figure of matplotlib: loss, metrics and learning rate over the epochs, beside validation.

        A notebook shows it; elsewhere `.savefig("history.png")` writes it.

        Args:
            keys: what to show, without `val_`; None shows all.

        Raises:
            InputError: there are no epochs, or a key was not recorded.
            MissingPackageError: matplotlib is not installed.
        """
        from onnxtrain.trainer._plots import plot_epochs

        shown = [key for key in self.keys() if key != "epoch" and not key.startswith("val_")]
        if not shown:
            raise InputError("There is nothing to plot: no epoch has been recorded.")
        if unknown := [key for key in keys or () if key not in shown]:
            raise InputError(f"{', '.join(unknown)} was not recorded; there are {', '.join(shown)}.")
        return plot_epochs(self.epochs, list(keys) if keys else shown)

    def to_frame(self) -> DataFrame:
        """Returns a pandas frame with a row per epoch, indexed by its number, and a column per key.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        pandas = optional("pandas", "History.to_frame", "pandas, or 'onnxtrain[plots]'")
        frame: DataFrame = pandas.DataFrame(self.epochs, columns=self.keys() or ["epoch"])
        return frame.set_index("epoch")
