"""Defines the workspace of workers other than worker 0: a temporary directory that cannot be resumed."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from onnxtrain.trainer._run.workspace import Workspace


class FollowerWorkspace(Workspace):
    """Temporary directory of a worker other than worker 0; it is removed with this object.

    Args:
        leader_is_temporary: True if the directory of worker 0 is temporary. All workers must agree on it, because they
            save at the same points of a fit.
    """

    def __init__(self, leader_is_temporary: bool) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="onnxtrain-worker-")), temporary=True)
        self._leader_is_temporary = leader_is_temporary

    @property
    def temporary(self) -> bool:
        """True if the directory of worker 0 is temporary."""
        return self._leader_is_temporary

    def keep(self) -> None:
        """Records that worker 0 keeps its directory. This worker's own directory is still removed."""
        self._leader_is_temporary = False

    def locked(self) -> contextlib.AbstractContextManager[object]:
        """Locks nothing: no other process knows the directory."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def saving(self, target: Path) -> Iterator[None]:
        """Locks nothing: this worker writes no files."""
        yield

    def note(self) -> None:
        """Does nothing."""

    def require_own(self, doing: str) -> None:
        """Does nothing: worker 0 checks its directory."""
