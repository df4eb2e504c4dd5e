"""Callbacks: what to do between the steps and epochs of a training run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtrain.trainer._history import History

if TYPE_CHECKING:
    from onnxtrain.trainer._trainer import Trainer


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

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Called in place of `on_fit_end` where a fit ends with an exception, which then goes on its way."""
