"""Detects changed files, and copies the files of a run that are missing or different in another directory."""

from __future__ import annotations

import filecmp
from collections.abc import Sequence
from pathlib import Path

from onnxtrain.runtime.atomic import FileSet

Stamp = tuple[int, int, int]
"""Identity and version of a file on disk: inode, size in bytes, modification time in nanoseconds."""


def stamp(path: Path) -> Stamp:
    """Returns the identity and version of a file.

    Raises:
        OSError: the file does not exist.
    """
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


class Copies:
    """Copies a run's files to another directory, and skips files that are already there with the same content.

    Files that were once found equal are compared again only if their size, inode or modification time has changed, so
    that repeated saves to the same directory do not read large models.
    """

    def __init__(self) -> None:
        # The versions of source and target that were equal, by target.
        self._equal: dict[Path, tuple[Stamp, Stamp]] = {}

    def add(self, files: FileSet, target: Path, group: Sequence[Path]) -> None:
        """Adds copies of a group of files to a file set, unless the target directory already contains the whole group.

        Args:
            files: set of files that will be written together.
            target: directory that the file set is written to.
            group: files that belong together, e.g. a model and its external data.
        """
        # A model and its external data are copied together, because neither works without the other.
        if not all(self._same(path, target / path.name) for path in group):
            for path in group:
                files.copy(path, path.name)

    def _same(self, source: Path, target: Path) -> bool:
        if not target.is_file():
            return False
        seen = (stamp(source), stamp(target))
        if self._equal.get(target) != seen:
            if not filecmp.cmp(source, target, shallow=False):
                return False
            self._equal[target] = seen
        return True
