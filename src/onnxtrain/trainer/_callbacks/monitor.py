"""Defines the base class of callbacks that compare epochs."""

from __future__ import annotations

from typing import Literal

from onnxtrain.errors import InputError
from onnxtrain.trainer._run.history import best_index
from onnxtrain.trainer._trainer import Callback, Trainer

Mode = Literal["auto", "min", "max"]


class Monitor(Callback):
    """Base class for callbacks that compare the epochs of a fit by one recorded value."""

    def __init__(self, monitor: str, mode: Mode, min_delta: float = 0.0) -> None:
        if mode not in ("auto", "min", "max"):
            raise InputError(
                f"{type(self).__name__}: mode must be 'auto', 'min' or 'max', received {mode!r}."
            )
        self.monitor = monitor
        self.mode = mode
        self.min_delta = min_delta

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Checks that the monitored value will be recorded, and that it is known whether higher values are better.

        Raises:
            InputError: the monitored value is not recorded; or `mode` is "auto", but the metric does not define which
                values are better.
        """
        # Checked before the first step, not after the first epoch.
        if self.monitor not in trainer.recorded_keys:
            raise InputError(
                f"{type(self).__name__}: '{self.monitor}' will not be recorded in this fit, which records "
                f"{', '.join(trainer.recorded_keys)}. Pass validation data, or choose another monitor."
            )
        self._rises(trainer)

    def _rises(self, trainer: Trainer) -> bool:
        """True if higher values are better.

        Raises:
            InputError: `mode` is "auto" and the metric does not define which values are better.
        """
        if self.mode != "auto":
            return self.mode == "max"
        name = self.monitor.removeprefix("val_")
        higher_is_better = {"loss": False} | {
            metric.name: metric.higher_is_better for metric in trainer.metrics
        }
        rises = higher_is_better.get(name)
        if rises is None:
            raise InputError(
                f"{type(self).__name__}: '{self.monitor}' is a function, so it is unknown whether higher "
                "or lower values are better. Pass mode='max' or mode='min'."
            )
        return rises

    def _epochs_since_best(self, trainer: Trainer) -> int:
        """Returns the number of epochs since the best epoch of the fit; 0 if the last epoch is the best."""
        values = [epoch[self.monitor] for epoch in trainer.history.epochs[trainer.fit_start :]]
        best = best_index(values, rises=self._rises(trainer), min_delta=self.min_delta)
        return len(values) - 1 - best
