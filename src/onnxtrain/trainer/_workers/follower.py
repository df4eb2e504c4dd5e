"""Defines the workspace of the workers that do not lead: a temporary directory that nobody resumes from."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from onnxtrain.trainer._run.workspace import Workspace


class FollowerWorkspace(Workspace):
    """Temporary directory of a worker that does not lead; it disappears with this object.

    Args:
        leader_is_temporary: True if the leader's directory is temporary. All workers save at the same places of a fit,
            so they must agree on it.
    """

    def __init__(self, leader_is_temporary: bool) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="onnxtrain-worker-")), temporary=True)
        self._leader_is_temporary = leader_is_temporary

    @property
    def temporary(self) -> bool:
        """True if the leader's directory will be removed."""
        return self._leader_is_temporary

    def keep(self) -> None:
        """Notes that the leader keeps its directory; this one is removed all the same."""
        self._leader_is_temporary = False

    def locked(self) -> contextlib.AbstractContextManager[object]:
        """Locks nothing: nobody else knows the name of the directory."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def saving(self, target: Path) -> Iterator[None]:
        """Locks nothing: this worker saves nothing."""
        yield

    def note(self) -> None:
        """Records nothing."""

    def require_own(self, doing: str) -> None:
        """Checks nothing: the leader checks its directory."""
