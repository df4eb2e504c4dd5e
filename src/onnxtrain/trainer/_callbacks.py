"""Callbacks: what to do between the epochs of a training run."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from onnxtrain.errors import InputError
from onnxtrain.trainer._history import History
from onnxtrain.trainer._state import BEST

if TYPE_CHECKING:
    from onnxtrain.trainer._trainer import Trainer

__all__ = ["Callback", "EarlyStopping", "Events", "ModelCheckpoint", "ReduceLROnPlateau", "callback_list"]

Mode = Literal["auto", "min", "max"]


class Callback:
    """Base class: override what is needed.

    A callback that decides from `trainer.history` rather than from its own attributes decides the same after
    the run has been resumed.
    """

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Called once, before the first step of a fit (or of its continuation)."""

    def on_step_end(self, trainer: Trainer, loss: float) -> None:
        """Called after each optimizer step with the loss of its samples."""

    def on_epoch_end(self, trainer: Trainer, history: History) -> None:
        """Called after each epoch, whose entry is `history.last`; `trainer.stop_training()` ends the fit."""

    def on_fit_end(self, trainer: Trainer, history: History) -> None:
        """Called once at the end, also when the fit was stopped or interrupted."""


class _Monitor(Callback):
    """Compares the epochs of a fit by one recorded value."""

    def __init__(self, monitor: str, mode: Mode, min_delta: float = 0.0) -> None:
        if mode not in ("auto", "min", "max"):
            raise InputError(
                f"{type(self).__name__}: mode must be 'auto', 'min' or 'max', received {mode!r}."
            )
        self.monitor = monitor
        self.mode = mode
        self.min_delta = min_delta

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Checks that the value will be recorded, and that it is known what is better."""
        if self.monitor not in trainer.recorded_keys:
            raise InputError(
                f"{type(self).__name__}: '{self.monitor}' will not be recorded in this fit, which records "
                f"{', '.join(trainer.recorded_keys)}. Pass validation data, or choose another monitor."
            )
        self._rises(trainer)

    def _rises(self, trainer: Trainer) -> bool:
        """Returns whether more is better.

        Raises:
            InputError: The value is that of a function, of which nothing is known.
        """
        if self.mode != "auto":
            return self.mode == "max"
        name = self.monitor.removeprefix("val_")
        known = {"loss": False} | {metric.name: metric.higher_is_better for metric in trainer.metrics}
        rises = known.get(name)
        if rises is None:
            raise InputError(
                f"{type(self).__name__}: whether more or less of '{self.monitor}' is better is not known, as it is a "
                "function. Pass mode='max' or mode='min'."
            )
        return rises

    def _scores(self, trainer: Trainer) -> list[float]:
        """The monitored values of this fit, turned so that more is better."""
        rising = self._rises(trainer)
        values = [epoch[self.monitor] for epoch in trainer.history.epochs[trainer.fit_start :]]
        scores = values if rising else [-value for value in values]
        return [-math.inf if math.isnan(score) else score for score in scores]

    def _best(self, scores: Sequence[float]) -> int:
        """Index of the last epoch that was better than all before it by `min_delta`."""
        best = 0
        for index, score in enumerate(scores):
            if score > scores[best] + self.min_delta:
                best = index
        return best


class EarlyStopping(_Monitor):
    """Ends a fit when the monitored value has not improved for `patience` epochs.

    Args:
        monitor: recorded value to watch.
        patience: epochs without improvement to wait for.
        min_delta: by how much a value must be better to count.
        mode: whether less ("min") or more ("max") is better; "auto" knows the loss and the named metrics, but not
            metrics that are functions.
        restore_best: put the parameters of the best epoch back at the end, also in what is saved. Until then they
            are kept in the file `best` of the trainer's directory.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        patience: int = 5,
        min_delta: float = 0.0,
        mode: Mode = "auto",
        restore_best: bool = False,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise InputError(f"EarlyStopping: patience must be an integer >= 1, received {patience!r}.")
        self.patience = patience
        self.restore_best = restore_best

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Forgets the best parameters of an earlier fit."""
        super().on_fit_begin(trainer)
        if len(trainer.history) == trainer.fit_start:
            (trainer.directory / BEST).unlink(missing_ok=True)

    def on_epoch_end(self, trainer: Trainer, history: History) -> None:
        """Keeps the best parameters, and stops when patience is at its end."""
        scores = self._scores(trainer)
        best = self._best(scores)
        if self.restore_best and best == len(scores) - 1:
            trainer.save_parameters(trainer.directory / BEST)
        if len(scores) - 1 - best >= self.patience:
            trainer.stop_training()

    def on_fit_end(self, trainer: Trainer, history: History) -> None:
        """Puts the best parameters back, unless the fit is to be continued."""
        if self.restore_best and history.stopped != "interrupted" and (trainer.directory / BEST).is_file():
            trainer.load_parameters(trainer.directory / BEST)


class ReduceLROnPlateau(_Monitor):
    """Multiplies the learning rate by `factor` each time the value has not improved for `patience` epochs.

    Args:
        monitor: recorded value to watch.
        factor: what to multiply by, between 0 and 1.
        patience: epochs without improvement to wait for.
        min_lr: the lowest rate.
        min_delta: by how much a value must be better to count.
        mode: as for :class:`EarlyStopping`.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.5,
        patience: int = 3,
        min_lr: float = 0.0,
        min_delta: float = 0.0,
        mode: Mode = "auto",
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        if not 0 < factor < 1 or patience < 1:
            raise InputError(
                f"ReduceLROnPlateau: expected 0 < factor < 1 and patience >= 1, received {factor} and "
                f"{patience}."
            )
        self.factor = factor
        self.patience = patience
        self.min_lr = min_lr

    def on_epoch_end(self, trainer: Trainer, history: History) -> None:
        """Lowers the rate after every `patience` epochs since the best one."""
        scores = self._scores(trainer)
        waited = len(scores) - 1 - self._best(scores)
        if waited and waited % self.patience == 0:
            trainer.learning_rate = max(self.min_lr, trainer.learning_rate * self.factor)


class ModelCheckpoint(_Monitor):
    """Saves the trainer after each epoch that is better than all before it, for :meth:`Trainer.resume`.

    Args:
        path: directory to save to.
        monitor: recorded value to compare; None saves after every epoch.
        mode: as for :class:`EarlyStopping`.
    """

    def __init__(
        self, path: str | os.PathLike[str], monitor: str | None = "val_loss", mode: Mode = "auto"
    ) -> None:
        super().__init__(monitor or "loss", mode)
        self.path = Path(path)
        self.every_epoch = monitor is None

    def on_epoch_end(self, trainer: Trainer, history: History) -> None:
        """Saves if this epoch is the best."""
        scores = self._scores(trainer)
        if self.every_epoch or self._best(scores) == len(scores) - 1:
            trainer.save(self.path)


class Events:
    """Tells all callbacks of a fit what happens to its trainer."""

    def __init__(self, callbacks: Sequence[Callback], trainer: Trainer) -> None:
        self._callbacks = callbacks
        self._trainer = trainer

    def fit_begin(self) -> None:
        """Calls :meth:`Callback.on_fit_begin`."""
        for callback in self._callbacks:
            callback.on_fit_begin(self._trainer)

    def step_end(self, loss: float) -> None:
        """Calls :meth:`Callback.on_step_end`."""
        for callback in self._callbacks:
            callback.on_step_end(self._trainer, loss)

    def epoch_end(self, history: History) -> None:
        """Calls :meth:`Callback.on_epoch_end`."""
        for callback in self._callbacks:
            callback.on_epoch_end(self._trainer, history)

    def fit_end(self, history: History) -> None:
        """Calls :meth:`Callback.on_fit_end`."""
        for callback in self._callbacks:
            callback.on_fit_end(self._trainer, history)


def callback_list(callbacks: Iterable[Callback] | None) -> list[Callback]:
    """Returns the callbacks that were given to a fit as a list; raises InputError for anything else."""
    if callbacks is None:
        return []
    given = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
    if not all(isinstance(entry, Callback) for entry in given) or isinstance(callbacks, Callback):
        received = ", ".join(type(entry).__name__ for entry in given)
        raise InputError(f"callbacks must be a list of callbacks, received {received}.")
    if sum(isinstance(entry, EarlyStopping) and entry.restore_best for entry in given) > 1:
        raise InputError("Only one EarlyStopping can have restore_best=True: there is one set of parameters.")
    return given
