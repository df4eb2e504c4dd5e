"""`ModelCheckpoint`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from onnxtrain.trainer._callbacks._monitor import Mode, Monitor
from onnxtrain.trainer._history import History

if TYPE_CHECKING:
    from onnxtrain.trainer._trainer import Trainer

__all__ = ["ModelCheckpoint"]


class ModelCheckpoint(Monitor):
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
