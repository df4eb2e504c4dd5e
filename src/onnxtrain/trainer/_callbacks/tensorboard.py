"""Logs a run for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnxtrain.errors import InputError, MissingPackageError
from onnxtrain.runtime.artifact_folder import require_inside
from onnxtrain.trainer._callbacks.logger import Logger
from onnxtrain.trainer._optional import optional
from onnxtrain.trainer._trainer import Trainer


class TensorBoardLogger(Logger):
    """Writes event files for TensorBoard: `step/loss`, `step/learning_rate`, and `epoch/...` for the history's keys.

    The x axis is the number of optimizer steps. The files are written with tensorboardX or, if it is not installed,
    with PyTorch and tensorboard. A resumed run writes a new file; TensorBoard then discards older entries for the steps
    after the last save, which the run repeats.

    Args:
        directory: directory for the event files, e.g. to pass to `tensorboard --logdir`.
        every_n_steps: log every n-th step; None logs only epochs.

    Raises:
        MissingPackageError: neither package is installed.
    """

    def __init__(self, directory: str | os.PathLike[str], every_n_steps: int | None = 1) -> None:
        super().__init__(every_n_steps)
        # Absolute, because the program may change its working directory before the fit.
        self.directory = Path(directory).absolute()
        self._make = _summary_writer()
        self._writer: Any = None

    def open(self, trainer: Trainer) -> None:
        """Opens a new event file."""
        self.close()
        require_inside(self.directory, trainer.directory)
        if self.directory.exists() and not self.directory.is_dir():
            raise InputError(
                f"TensorBoardLogger: '{self.directory}' is a file. Name a directory for the event files."
            )
        step = trainer.global_step
        # File names contain the time in seconds, and TensorBoard reads files in the order of their names. The step and
        # random digits distinguish and order files of the same second.
        suffix = f".{step:012d}.{os.urandom(4).hex()}"
        self._writer = self._make(str(self.directory), purge_step=step + 1, filename_suffix=suffix)

    def log_step(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Adds the values of a step."""
        self._add("step", trainer, values)

    def log_epoch(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Adds the values of an epoch."""
        self._add("epoch", trainer, {key: value for key, value in values.items() if key != "epoch"})
        # Shows the epoch immediately, not when a buffer is full.
        self._writer.flush()

    def log_evaluation(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Adds the values of an evaluation in the middle of an epoch."""
        self._add("step", trainer, {key: value for key, value in values.items() if key.startswith("val_")})

    def _add(self, prefix: str, trainer: Trainer, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(f"{prefix}/{key}", value, trainer.global_step)

    def close(self) -> None:
        """Closes the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _summary_writer() -> Any:
    try:
        return optional("tensorboardX", "TensorBoardLogger", "'onnxtrain[tensorboard]'").SummaryWriter
    except MissingPackageError as missing:
        try:
            return optional("torch.utils.tensorboard", "TensorBoardLogger", "").SummaryWriter
        except ImportError:
            raise missing from None
