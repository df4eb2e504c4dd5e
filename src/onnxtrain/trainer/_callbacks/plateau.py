"""Lowers the learning rate when a value no longer improves."""

from __future__ import annotations

from onnxtrain.errors import InputError
from onnxtrain.trainer._callbacks.monitor import Mode, Monitor
from onnxtrain.trainer._run.history import History
from onnxtrain.trainer._trainer import Trainer


class ReduceLROnPlateau(Monitor):
    """Multiplies the learning rate by `factor` whenever a value has not improved for `patience` epochs.

    Args:
        monitor: recorded value to compare, e.g. "val_loss".
        factor: factor in (0, 1) that multiplies the learning rate, e.g. 0.5.
        patience: number of epochs without improvement after which the learning rate is lowered.
        min_lr: lower bound on the learning rate.
        min_delta: smallest change that counts as an improvement.
        mode: see :class:`EarlyStopping`.
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
                f"ReduceLROnPlateau: expected 0 < factor < 1 and patience >= 1, received factor={factor} and"
                f" patience={patience}."
            )
        self.factor = factor
        self.patience = patience
        self.min_lr = min_lr

    def on_epoch_end(self, trainer: Trainer, history: History) -> None:
        """Lowers the learning rate after every `patience` epochs without improvement."""
        waited = self._epochs_since_best(trainer)
        # Computed from the history, not from a counter, so that a resumed run lowers the learning rate at the same
        # epochs.
        if waited and waited % self.patience == 0:
            trainer.learning_rate = max(self.min_lr, trainer.learning_rate * self.factor)
