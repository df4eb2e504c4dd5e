"""The directory of a training run."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path

from onnxtrain.errors import CheckpointError
from onnxtrain.runtime.atomic import finish_interrupted
from onnxtrain.trainer._run import CHECKPOINT

__all__ = ["Workspace"]


_OF_A_RUN = ("best", "average", "predictions-*.npz")
"""Files that not every run has."""


class Workspace:
    """A directory that is the user's, or a temporary one that goes with this object unless it is kept.

    Attributes:
        path: the directory.
    """

    def __init__(self, path: Path, *, temporary: bool = False) -> None:
        self.path = path
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
                f"The directory '{path}' holds a training run already. Go on with Trainer.resume('{path}'), "
                "choose another directory, or replace the run with overwrite=True."
            )
        return cls(path)

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
