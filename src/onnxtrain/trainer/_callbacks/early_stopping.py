"""Stops training when a value no longer improves."""

from __future__ import annotations

from onnxtrain.trainer._callbacks.monitor import Mode, Monitor
from onnxtrain.trainer._checks import check_integer
from onnxtrain.trainer._run.files import BEST
from onnxtrain.trainer._run.history import History
from onnxtrain.trainer._trainer import Trainer


class EarlyStopping(Monitor):
    """Stops training when a monitored value has not improved for `patience` epochs.

    Args:
        monitor: recorded value to compare, e.g. "val_loss".
        patience: number of epochs without improvement after which the fit ends.
        min_delta: smallest change that counts as an improvement.
        mode: "min" if lower values are better, "max" if higher values are better. "auto" works for the loss and for
            metrics given by name; for metrics given as functions, pass "min" or "max".
        restore_best: at the end of the fit, restore the parameters of the best epoch, in the trainer and in its saved
            run. During the fit, they are in the file `best` in the trainer's directory.
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
        self.patience = check_integer("EarlyStopping: patience", patience)
        self.restore_best = restore_best

    def _sets_parameters_at_end(self) -> str | None:
        return "EarlyStopping(restore_best=True)" if self.restore_best else None

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Deletes the best parameters saved by an earlier fit."""
        super().on_fit_begin(trainer)
        # A resumed fit needs the file: its best epoch may be over.
        if len(trainer.history) == trainer.fit_start:
            (trainer.directory / BEST).unlink(missing_ok=True)

    def best_epoch(self, trainer: Trainer) -> int:
        """Returns the number of the best epoch of the last fit, counted from 1 over all fits.

        With `restore_best`, the trainer has the parameters of this epoch after the fit.
        """
        return len(trainer.history) - self._epochs_since_best(trainer)

    def on_epoch_end(self, trainer: Trainer, history: History) -> None:
        """Saves the best parameters; stops the fit after `patience` epochs without improvement."""
        waited = self._epochs_since_best(trainer)
        # Saved to a file, so that the best parameters survive if the process is killed.
        if self.restore_best and waited == 0:
            trainer.save_parameters(trainer.directory / BEST)
        if waited >= self.patience:
            trainer.stop_training()

    def on_fit_end(self, trainer: Trainer, history: History) -> None:
        """Restores the best parameters, unless the fit was interrupted and can be resumed."""
        if self.restore_best and history.stopped != "interrupted" and (trainer.directory / BEST).is_file():
            trainer.load_parameters(trainer.directory / BEST)
