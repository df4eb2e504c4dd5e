"""The directory of a training run."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

from onnxtrain._words import argument, words
from onnxtrain.errors import CheckpointError
from onnxtrain.runtime.atomic import finish_interrupted
from onnxtrain.trainer._directory_lock import DirectoryLock
from onnxtrain.trainer._run import CHECKPOINT

_OF_A_RUN = ("best", "average", "predictions-*.npz")
"""Files that not every run has."""


class Workspace:
    """A directory that is the user's, or a temporary one that goes with this object unless it is kept.

    Attributes:
        path: the directory.
    """

    def __init__(self, path: Path, *, temporary: bool = False) -> None:
        self.path = path
        self._lock = DirectoryLock(path)
        self._seen: tuple[int, int, int] | None = (
            None  # the checkpoint, as this object has read or written it
        )
        self._cleanup = weakref.finalize(self, shutil.rmtree, path, ignore_errors=True) if temporary else None

    @classmethod
    def for_new_run(cls, directory: str | os.PathLike[str] | None, *, overwrite: bool = False) -> Workspace:
        """Returns a directory for a new run, which need not be there yet; a temporary one for None.

        Raises:
            CheckpointError: There is a run in it already, which is not to be overwritten.
        """
        if directory is None:
            return cls(Path(tempfile.mkdtemp(prefix="onnxtrain-")), temporary=True)
        path = Path(directory)
        try:
            finish_interrupted(path / CHECKPOINT)
        except OSError as error:
            raise CheckpointError(f"Beginning a training run in '{path}': {error}.") from error
        if (path / CHECKPOINT).exists() and not overwrite:
            raise CheckpointError(
                f"The directory '{path}' holds a training run already. {words().resume(path)}, choose another "
                f"directory, or replace the run with {argument('overwrite', True)}."
            )
        return cls(path)

    def locked(self) -> contextlib.AbstractContextManager[object]:
        """Keeps other trainers from training and saving in the directory until the block ends.

        Raises:
            CheckpointError: One of them is.
        """
        return contextlib.nullcontext() if self.temporary else self._lock

    @contextlib.contextmanager
    def saving(self, target: Path) -> Iterator[None]:
        """Keeps other trainers out of `target`, this directory or another one, until the block ends.

        Raises:
            CheckpointError: One of them is at work there, or has saved to this directory since :meth:`note`.
        """
        if target.resolve() != self.path.resolve():
            with DirectoryLock(target):
                yield
            return
        with self.locked():
            self.require_own(f"Saving the run to '{target}'")
            yield
            self.note()

    def note(self) -> None:
        """Remembers the checkpoint in the directory, which this trainer has just read or written."""
        self._seen = self._stamp()

    def require_own(self, doing: str) -> None:
        """Raises CheckpointError if another trainer has saved in the directory since :meth:`note`.

        Args:
            doing: what is about to be done, for the message.
        """
        found = self._stamp()
        if not self.temporary and None not in (found, self._seen) and found != self._seen:
            raise CheckpointError(
                f"{doing}: another Trainer has saved to '{self.path}' since this one has read or saved it, and what it "
                f"has saved would be lost. {words().resume(self.path)} from there, or save this "
                "one to another directory first."
            )

    def _stamp(self) -> tuple[int, int, int] | None:
        """Returns what of the checkpoint changes with each save; None where there is none."""
        try:
            status = (self.path / CHECKPOINT).stat()
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def remove_earlier(self) -> None:
        """Removes what an earlier run has left beside the files that a new one has replaced."""
        for pattern in _OF_A_RUN:
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)

    @property
    def temporary(self) -> bool:
        """Whether the directory will be removed."""
        return self._cleanup is not None

    def keep(self) -> None:
        """Makes a temporary directory stay."""
        if self._cleanup is not None:
            self._cleanup.detach()
            self._cleanup = None
