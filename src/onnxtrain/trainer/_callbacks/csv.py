"""Logs a run to CSV files."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TextIO

from onnxtrain._printable import printable
from onnxtrain.errors import InputError
from onnxtrain.runtime.artifact_folder import keep_inside
from onnxtrain.runtime.atomic import FileSet, is_stream, replace_file
from onnxtrain.trainer._callbacks.logger import Logger
from onnxtrain.trainer._trainer import Trainer

_STEP_COLUMNS = ("epoch", "step", "loss", "learning_rate")


class CSVLogger(Logger):
    """Writes the history to a CSV file, one row per epoch, and each step to a second file.

    The first file contains the trainer's whole history, including earlier fits, and is rewritten after each epoch.
    Steps are appended to a second file, `log.steps.csv` for `log.csv`. Evaluations in the middle of epochs go to a
    third file, `log.evaluations.csv`. Floats round-trip exactly. If `path` is a device or a pipe, such as /dev/stdout,
    only epochs are written, one row at the end of each epoch.

    Args:
        path: file for the epochs, e.g. "log.csv".
        every_n_steps: log every n-th step; None logs only epochs.
    """

    def __init__(self, path: str | os.PathLike[str], every_n_steps: int | None = 1) -> None:
        super().__init__(every_n_steps)
        # Absolute, because the program may change its working directory before the fit.
        self.path = Path(path).absolute()
        self._file: TextIO | None = None
        # Written to a device or a pipe so far: columns of the last header, and number of epochs.
        self._streamed: tuple[list[str], int] = [], 0

    @property
    def steps_path(self) -> Path:
        """Path of the file with one row per step, e.g. `log.steps.csv` for `log.csv`."""
        return self.path.with_name(f"{self.path.stem}.steps{self.path.suffix}")

    def open(self, trainer: Trainer) -> None:
        """Writes the history so far, and drops the rows of steps that a resumed run will repeat.

        Raises:
            InputError: the existing steps file is not a log of steps.
        """
        self.close()
        keep_inside(self.path, trainer.directory)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._streamed = [], 0
        self._write_epochs(trainer)
        if self.every_n_steps is not None and not is_stream(self.path):
            # A killed run may have logged steps after its last save; the resumed run repeats them.
            kept = self._steps_until(trainer.global_step)
            _replace(self.steps_path, [_STEP_COLUMNS, *kept])
            # Line buffering: if the process is killed, the file contains every complete row.
            self._file = open(self.steps_path, "a", encoding="utf-8", newline="", buffering=1)  # noqa: SIM115

    def log_step(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Appends a row for the step."""
        if self._file is None:
            return
        row = {"epoch": len(trainer.history) + 1, "step": trainer.global_step, **values}
        csv.writer(self._file).writerow([row[column] for column in _STEP_COLUMNS])

    def log_epoch(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Rewrites the file with one row per epoch."""
        self._write_epochs(trainer)

    def log_evaluation(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Rewrites the file with one row per evaluation in the middle of an epoch."""
        if is_stream(self.path):
            return
        evaluations = trainer.history.evaluations
        # A later fit may record other metrics.
        keys = list(dict.fromkeys(key for entry in evaluations for key in entry))
        rows = ([entry.get(key, "") for key in keys] for entry in evaluations)
        _replace(
            self.path.with_name(f"{self.path.stem}.evaluations{self.path.suffix}"),
            [map(printable, keys), *rows],
        )

    def close(self) -> None:
        """Closes the steps file (:attr:`steps_path`)."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_epochs(self, trainer: Trainer) -> None:
        # Rewritten, because the columns may change between fits, e.g. with validation data.
        keys = trainer.history.keys() or ["epoch"]
        # A device or a pipe only gets the new rows, after a new header if the columns changed.
        header, written = self._streamed if is_stream(self.path) else ([], 0)
        rows: list[list[object]] = [
            [epoch.get(key, "") for key in keys] for epoch in trainer.history.epochs[written:]
        ]
        if is_stream(self.path):
            if not rows:
                return
            self._streamed = keys, written + len(rows)
        if keys != header:
            rows.insert(0, list(map(printable, keys)))
        with replace_file(self.path) as file:
            file.write(_csv(rows))

    def _steps_until(self, step: int) -> list[list[str]]:
        """Returns the rows of the existing steps file to keep when a run is resumed: those up to step number `step`.

        Drops incomplete rows, and rows of later steps, which the resumed run repeats. Returns [] if `step` is 0, or if
        the file does not exist or is a symlink.

        Raises:
            InputError: the file is not a log of steps.
        """
        if step == 0 or self.steps_path.is_symlink() or not self.steps_path.is_file():
            return []
        try:
            with open(self.steps_path, encoding="utf-8", newline="") as file:
                rows = list(csv.reader(file))
        except (UnicodeDecodeError, csv.Error) as error:
            raise InputError(
                f"CSVLogger: '{self.steps_path}' is not a log of steps ({error}); move it away, or log to another path."
            ) from error
        if rows and rows[0] != list(_STEP_COLUMNS):
            raise InputError(
                f"CSVLogger: '{self.steps_path}' has the columns {', '.join(rows[0])} instead of "
                f"{', '.join(_STEP_COLUMNS)}; move it away, or log to another path."
            )
        # The last row may be incomplete if the process was killed.
        complete_rows = [row for row in rows[1:] if len(row) == len(_STEP_COLUMNS)]
        return [
            row for row in complete_rows if row[1].isdecimal() and len(row[1]) < 20 and int(row[1]) <= step
        ]


def _csv(rows: Iterable[Iterable[object]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def _replace(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Replaces a CSV file; a symlink with the name of the file is replaced, not followed.

    The name is derived from the path that the user passed, so the user has not chosen to write through that symlink.
    """
    with FileSet(path.parent) as files, files.open(path.name) as file:
        file.write(_csv(rows))
