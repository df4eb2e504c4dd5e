"""Manages the directory of a run: locks it, detects saves by other trainers, and removes temporary directories."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

from onnxtrain._words import argument, words
from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.runtime.artifact_folder import MANIFEST, own_file, require_inside
from onnxtrain.runtime.atomic import finish_interrupted
from onnxtrain.trainer._run.copies import Stamp, stamp
from onnxtrain.trainer._run.directory_lock import LOCK, DirectoryLock
from onnxtrain.trainer._run.files import CHECKPOINT, companions, holds_run, require_free
from onnxtrain.trainer._run.position import PROPERTY


class Workspace:
    """Manages the directory of a run: locks it, and detects checkpoints that other trainers have saved there.

    A temporary directory is deleted when this object is garbage-collected or the interpreter exits, unless :meth:`keep`
    is called.

    Args:
        path: the directory.
        temporary: True to delete the directory as described above.

    Attributes:
        path: absolute path, which does not depend on the working directory.
    """

    def __init__(self, path: Path, *, temporary: bool = False) -> None:
        self.path = path.absolute()
        self._lock = DirectoryLock(self.path)
        # True if files of an earlier run may be removed, because a manifest proves that they are not the user's.
        self._replaces_run = False
        # Identity of the checkpoint when this trainer last read or wrote it.
        self._seen: Stamp | None = None
        # Unlike `__del__`, a finalizer always runs when the interpreter exits.
        self._cleanup = weakref.finalize(self, _remove, path, os.getpid()) if temporary else None

    @classmethod
    def for_new_run(cls, directory: str | os.PathLike[str] | None, *, overwrite: bool = False) -> Workspace:
        """Returns a workspace for a new run, after checking that the run would not overwrite the user's files.

        Args:
            directory: directory of the run, which need not exist; None creates a temporary directory.
            overwrite: True to allow the run to replace an earlier run and other files.

        Raises:
            CheckpointError: `overwrite` is not set, and the directory contains a run, or user files that the run would
                overwrite; or it contains a `manifest.json` that onnxtrain did not write.
            InputError: the directory has the suffix ".onnx".
        """
        if directory is None:
            return cls(Path(tempfile.mkdtemp(prefix="onnxtrain-")), temporary=True)
        path = Path(directory).absolute()
        doing = f"Starting a training run in '{path}'"
        if path.suffix.lower() == ".onnx":
            raise InputError(
                f"{doing}: that is a model file's name, but a run is a directory. Pass a directory, e.g. "
                f"'{path.with_suffix('')}', and write the trained model with Trainer.export."
            )
        try:
            own_file(path, CHECKPOINT)
            finish_interrupted(path / CHECKPOINT)
        except OSError as error:
            raise CheckpointError(f"{doing}: {error}.") from error
        replaces_run = holds_run(path)
        if replaces_run and (path / CHECKPOINT).exists() and not overwrite:
            raise CheckpointError(
                f"The directory '{path}' already contains a training run. {words().resume(path)}, choose "
                f"another directory, or replace the run with {argument('overwrite', True)}."
            )
        if (path / MANIFEST).exists() and not replaces_run and overwrite:
            raise CheckpointError(
                f"{doing}: '{MANIFEST}' in it was not written by onnxtrain, and "
                f"{argument('overwrite', True)} replaces only training runs. Choose another directory, or "
                "move the file away."
            )
        if not overwrite:
            remedy = f", or let the run replace files of these names with {argument('overwrite', True)}"
            require_free(path, doing, remedy=remedy)
        workspace = cls(path)
        workspace._replaces_run = replaces_run
        return workspace

    def locked(self) -> contextlib.AbstractContextManager[object]:
        """Context manager that keeps other trainers out of the directory; a no-op for a temporary directory.

        Raises:
            CheckpointError: another trainer holds the lock.
        """
        # No other process knows the temporary directory.
        return contextlib.nullcontext() if self.temporary else self._lock

    @contextlib.contextmanager
    def saving(self, target: Path) -> Iterator[None]:
        """Context manager for a save to `target`: keeps other trainers out of that directory.

        Args:
            target: the directory to save to, which may be :attr:`path` or a different directory.

        Raises:
            CheckpointError: another trainer holds the lock, or has saved to this directory since :meth:`note`.
        """
        require_inside(target, self.path)
        if target.resolve() != self.path.resolve():
            with DirectoryLock(target):
                yield
            return
        with self.locked():
            self.require_own(f"Saving the run to '{target}'")
            yield
            self.note()

    def require_settings(self, *, trainer: bool) -> None:
        """Raises CheckpointError if a trainer wrote the directory, whose checkpoint lacks the trainer's settings.

        Args:
            trainer: True if a trainer wrote the models, according to their manifest.
        """
        left = self._lock.is_of_earlier_version()
        if not trainer and not left:
            return
        # `generate_artifacts` may have written the directory of a killed trainer.
        remedy = f", or remove '{LOCK}' if generate_artifacts wrote the directory" if not trainer else ""
        raise CheckpointError(
            f"Resuming from '{self.path}': the checkpoint lacks the property '{PROPERTY}', i.e. the trainer's learning "
            "rate, seed, schedule and metrics. Either the file has been replaced, or the trainer was killed before its "
            f"first save. Copy a complete checkpoint to the directory, or start a new run with "
            f"{argument('overwrite', True)}{remedy}."
        )

    def note(self) -> None:
        """Records the checkpoint that this trainer has just read or written, for :meth:`require_own`."""
        self._seen = self._stamp()

    def require_own(self, doing: str) -> None:
        """Raises CheckpointError if another trainer has saved to the directory since :meth:`note`.

        Args:
            doing: description of the rejected action, for error messages.
        """
        current = self._stamp()
        # Without a checkpoint then and now, nothing can be lost.
        if not self.temporary and None not in (current, self._seen) and current != self._seen:
            raise CheckpointError(
                f"{doing}: another Trainer has saved to '{self.path}' since this one last read or saved "
                f"it, and that checkpoint would be lost. {words().resume(self.path, 'from there ')}, or "
                "save this one to another directory first."
            )

    def _stamp(self) -> Stamp | None:
        """Returns the inode, size and modification time of the checkpoint; None if there is none."""
        try:
            return stamp(self.path / CHECKPOINT)
        except OSError:
            return None

    def remove_earlier(self) -> None:
        """Removes the optional files of an earlier run in this directory, which the new run must not inherit."""
        for name in companions(self.path) if self._replaces_run else ():
            if not (self.path / name).is_dir():
                (self.path / name).unlink(missing_ok=True)

    @property
    def temporary(self) -> bool:
        """True if the directory will be removed together with this object."""
        return self._cleanup is not None

    def keep(self) -> None:
        """Cancels the removal of the directory if it is temporary."""
        if self._cleanup is not None:
            self._cleanup.detach()
            self._cleanup = None


def _remove(path: Path, process: int) -> None:
    """Removes a temporary directory, but only in the process that created it.

    A forked process must not remove it, because the parent still needs it.

    Args:
        path: the directory.
        process: id of the process that created the directory.
    """
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)
