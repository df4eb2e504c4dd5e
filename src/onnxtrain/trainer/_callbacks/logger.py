"""Defines the base class of loggers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from onnxtrain.trainer._checks import check_integer
from onnxtrain.trainer._run.history import History
from onnxtrain.trainer._trainer import Callback, Trainer


def saved_id(trainer: Trainer, name: str) -> str | None:
    """Reads the id of a tracking server's run from the property `name` of a run that may come from a stranger.

    Returns:
        The id, e.g. "3f9a-12"; None without the property, or if the text is no id: servers use ids in paths and URLs.
    """
    text = str(dict(trainer.state.properties).get(name, ""))
    return text if re.fullmatch(r"[A-Za-z0-9_-]{1,128}", text) else None


class Logger(Callback):
    """Base class of loggers: a subclass overrides `open`, `log_step`, `log_epoch` and `close`.

    A resumed run repeats the steps after its last save. Loggers log such steps once: they remove the old entries, or
    do not write them again.

    Args:
        every_n_steps: log loss and learning rate of every so many steps; None logs epochs alone.
    """

    def __init__(self, every_n_steps: int | None = 1) -> None:
        if every_n_steps is not None:
            check_integer(f"{type(self).__name__}: every_n_steps", every_n_steps)
        self.every_n_steps = every_n_steps

    def open(self, trainer: Trainer) -> None:
        """Starts logging; entries of steps after `trainer.global_step` are obsolete."""
        raise NotImplementedError

    def log_step(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Logs values of the step `trainer.global_step`."""
        raise NotImplementedError

    def log_epoch(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Logs an entry of the history; the epoch ended with the step `trainer.global_step`."""
        raise NotImplementedError

    def log_evaluation(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Logs an evaluation in the middle of an epoch; a logger that does not override it ignores them."""

    def close(self) -> None:
        """Ends logging and flushes all entries."""
        raise NotImplementedError

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Opens the log."""
        self.open(trainer)

    def on_step_end(self, trainer: Trainer, loss: float) -> None:
        """Logs a step if its number is a multiple of `every_n_steps`."""
        # Counted from the first step of the run, not of the fit: a resumed run logs the same steps.
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
