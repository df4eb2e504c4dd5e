"""Saves a run during training, and keeps the best or the newest checkpoints."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.runtime.artifact_folder import require_inside
from onnxtrain.runtime.atomic import remove_special_file, rename_directory
from onnxtrain.trainer._callbacks.monitor import Mode, Monitor
from onnxtrain.trainer._checks import check_integer
from onnxtrain.trainer._run.files import CHECKPOINT, refuse_model_name
from onnxtrain.trainer._run.history import History
from onnxtrain.trainer._trainer import Trainer

# Prefix of directories that are incomplete: being written, or being removed.
_UNFINISHED = ".onnxtrain-unfinished-"


class ModelCheckpoint(Monitor):
    """Saves the trainer after each epoch that is the best so far. Use :meth:`Trainer.resume` to restore a save.

    Args:
        path: directory to save to; with `keep`, it contains one directory per save.
        monitor: recorded value to compare, e.g. "val_loss"; None saves after every epoch. Default: "val_loss", or None
            with `every_n_steps`.
        mode: see :class:`EarlyStopping`.
        every_n_steps: number of optimizer steps between saves, e.g. 500; None saves after epochs.
        keep: number of saves to keep, each in its own directory, `epoch-00000003` or `step-00001200`: the best epochs,
            or the newest saves if nothing is monitored. None keeps one save, in `path` itself.

    Saving is atomic: a save becomes visible only once it is complete, and the old save is removed afterwards.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        monitor: str | None = "auto",
        mode: Mode = "auto",
        *,
        every_n_steps: int | None = None,
        keep: int | None = None,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("keep", keep)):
            if value is not None:
                check_integer(f"ModelCheckpoint: {name}", value)
        # In the middle of an epoch there is no validation loss to compare.
        if monitor == "auto":
            monitor = "val_loss" if every_n_steps is None else None
        if monitor is not None and every_n_steps is not None:
            raise InputError(
                f"ModelCheckpoint: '{monitor}' is recorded after each epoch, but "
                f"every_n_steps={every_n_steps} saves within epochs. Pass only one of the two, or use two "
                "callbacks."
            )
        refuse_model_name(path, "ModelCheckpoint", "a directory with all that Trainer.resume needs")
        super().__init__(monitor or "loss", mode)
        # Absolute, because the program may change its working directory between two saves.
        self.path = Path(path).absolute()
        self.monitored = monitor is not None
        self.every_n_steps = every_n_steps
        self.keep = keep

    def _saves_after_step(self, step: int) -> bool:
        return self.every_n_steps is not None and step % self.every_n_steps == 0

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Checks that the monitored value will be recorded, and that no symlink redirects `path` out of the run.

        Raises:
            CheckpointError: `path` is in the trainer's directory, but resolves to a directory outside it, because of a
                symlink.
            InputError: the monitored value is not recorded; or `mode` is "auto", but the metric does not define which
                values are better.
        """
        require_inside(self.path, trainer.directory)
        if self.monitored:
            super().on_fit_begin(trainer)

    def on_step_end(self, trainer: Trainer, loss: float) -> None:
        """Saves the trainer if the step's number is a multiple of `every_n_steps`."""
        if self._saves_after_step(trainer.global_step):
            self._save(trainer, "step", trainer.global_step, self._newest)

    def on_epoch_end(self, trainer: Trainer, history: History) -> None:
        """Saves the trainer if this epoch is the best so far or, with `keep`, among the `keep` best.

        Without a monitored value, saves after every epoch. With `every_n_steps`, does nothing.
        """
        if self.every_n_steps is not None:
            return
        number = len(history)
        if not self.monitored:
            self._save(trainer, "epoch", number, self._newest)
        elif self.keep is None:
            if self._epochs_since_best(trainer) == 0:
                self._save(trainer, "epoch", number, self._newest)
        else:
            best = self._best_epochs(trainer)
            if number in best:
                self._save(trainer, "epoch", number, lambda numbers: best)

    def saved(self) -> list[Path]:
        """Returns the directories of the saves that were kept, oldest first."""
        return [self.path / name for _, _, name in sorted(self._directories())]

    def _best_epochs(self, trainer: Trainer) -> set[int]:
        """Returns the numbers of the `keep` best epochs; ties go to the earlier epoch."""
        sign = -1 if self._rises(trainer) else 1
        recorded = [
            (
                # NaN is the worst value.
                float("inf") if epoch[self.monitor] != epoch[self.monitor] else sign * epoch[self.monitor],
                number,
            )
            for number, epoch in enumerate(trainer.history.epochs, start=1)
            if self.monitor in epoch
        ]
        return {number for _, number in sorted(recorded)[: self.keep]}

    def _newest(self, numbers: list[int]) -> set[int]:
        return set(sorted(numbers)[-(self.keep or 1) :])

    def _save(
        self, trainer: Trainer, kind: str, number: int, choose: Callable[[list[int]], set[int]]
    ) -> None:
        """Saves the trainer, then removes older saves that `choose` does not select.

        Saves with higher numbers are never removed: they were made before the run was resumed from an earlier save.
        The directory that the trainer itself works in is kept as well.

        Args:
            trainer: the trainer to save.
            kind: "epoch" or "step".
            number: number of the epoch or step.
            choose: function that returns which of the given numbers to keep.
        """
        if self.keep is None:
            trainer.save(self.path)
            return
        try:
            _save_whole(trainer, self.path / f"{kind}-{number:08d}")
            saves = {n: name for k, n, name in self._directories() if k == kind and n <= number}
            working_directory = trainer.directory.resolve()
            for gone in saves.keys() - choose(list(saves)):
                # A trainer that was resumed from a save works in its directory.
                if (self.path / saves[gone]).resolve() != working_directory:
                    _remove_whole(self.path / saves[gone])
        except OSError as error:
            raise CheckpointError(f"Saving the run to '{self.path}' failed: {error}.") from error

    def _directories(self) -> list[tuple[str, int, str]]:
        """Lists the saves in `path` as (kind, number, directory name), e.g. ("epoch", 3, "epoch-00000003")."""
        names = [entry.name for entry in self.path.iterdir()] if self.path.is_dir() else []
        # Step numbers have at most 19 digits; links may lead out of this directory.
        matches = [(re.fullmatch(r"(epoch|step)-(\d{8,19})", name), name) for name in names]
        return [
            (match[1], int(match[2]), name)
            for match, name in matches
            if match is not None
            and (self.path / name / CHECKPOINT).is_file()
            and not (self.path / name).is_symlink()
        ]


def _save_whole(trainer: Trainer, target: Path) -> None:
    """Saves a trainer to a directory atomically: readers see the old save or the complete new one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Left by a process that was killed.
    for leftover in target.parent.glob(f"{_UNFINISHED}*"):
        remove_special_file(leftover)
        if leftover.exists():
            shutil.rmtree(leftover)
    # A save must not follow a link to a directory elsewhere.
    remove_special_file(target)
    if target.is_dir():
        trainer.save(target)
        return
    # A new save is written under another name and renamed, so that it becomes visible only when complete.
    unfinished = target.with_name(_UNFINISHED + target.name)
    try:
        trainer.save(unfinished)
        rename_directory(unfinished, target)
    except BaseException:
        # An incomplete save would only use up disk space.
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _remove_whole(directory: Path) -> None:
    """Removes a directory after renaming it, so that a partly removed save is never visible."""
    gone = directory.with_name(_UNFINISHED + directory.name)
    rename_directory(directory, gone)
    shutil.rmtree(gone)
