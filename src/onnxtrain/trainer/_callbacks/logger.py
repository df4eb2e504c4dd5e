"""Defines the base class of loggers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from onnxtrain.trainer._checks import check_integer
from onnxtrain.trainer._run.history import History
from onnxtrain.trainer._trainer import Callback, Trainer


def saved_id(trainer: Trainer, name: str) -> str | None:
    """Returns the tracking server's run id saved with a trainer, so that a resumed trainer continues the same run.

    Ids with characters other than letters, digits, "-" and "_" are ignored: the checkpoint may be untrusted, and
    servers use ids in paths and URLs.

    Args:
        trainer: the resumed trainer.
        name: checkpoint property with the id.

    Returns:
        The id, e.g. "3f9a-12"; None if the property is missing or not a valid id.
    """
    text = str(dict(trainer.state.properties).get(name, ""))
    return text if re.fullmatch(r"[A-Za-z0-9_-]{1,128}", text) else None


class Logger(Callback):
    """Base class for loggers: subclasses override `open`, `log_step`, `log_epoch` and `close`.

    A resumed run repeats the steps after its last save. Subclasses must log these steps only once, by removing the old
    entries or skipping the repeated steps.

    Args:
        every_n_steps: log the loss and the learning rate of every n-th step; None logs only epochs.
    """

    def __init__(self, every_n_steps: int | None = 1) -> None:
        if every_n_steps is not None:
            check_integer(f"{type(self).__name__}: every_n_steps", every_n_steps)
        self.every_n_steps = every_n_steps

    def open(self, trainer: Trainer) -> None:
        """Starts logging; called at the beginning of a fit.

        Existing entries for steps after `trainer.global_step` are obsolete, because a resumed run repeats these steps.
        """
        raise NotImplementedError

    def log_step(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Logs the values of step `trainer.global_step`."""
        raise NotImplementedError

    def log_epoch(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Logs the history entry of an epoch, which ended with step `trainer.global_step`."""
        raise NotImplementedError

    def log_evaluation(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Logs an evaluation in the middle of an epoch; by default, does nothing."""

    def close(self) -> None:
        """Flushes all entries and ends logging."""
        raise NotImplementedError

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Opens the log."""
        self.open(trainer)

    def on_step_end(self, trainer: Trainer, loss: float) -> None:
        """Logs the step if its number is a multiple of `every_n_steps`."""
        # Counted over the whole run, so that a resumed run logs the same steps.
        if self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0:
            self.log_step(trainer, {"loss": loss, "learning_rate": trainer.current_learning_rate})

    def on_evaluation(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Logs an evaluation in the middle of an epoch."""
        self.log_evaluation(trainer, values)

    def on_epoch_end(self, trainer: Trainer, history: History) -> None:
        """Logs an epoch."""
        self.log_epoch(trainer, history.last)

    def on_fit_end(self, trainer: Trainer, history: History) -> None:
        """Closes the log."""
        self.close()

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Closes the log."""
        self.close()
