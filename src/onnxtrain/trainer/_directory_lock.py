"""A lock of a directory that a process holds while it trains there."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from pathlib import Path
from types import TracebackType

from onnxtrain.errors import CheckpointError

_NAME = ".onnxtrain-lock"
_WINDOWS_OFFSET = 2**20
"""Byte that is locked on Windows, behind the text: what is locked there cannot be read."""

_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _forget() -> None:
    """Closes the copies of open files that a forked process has: they would hold the locks longer than its parent."""
    for lock in list(_held):
        lock.forget()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_forget)


class DirectoryLock:
    """Keeps other trainers, of this process and of others, from training and saving in a directory.

    Use it in a `with` statement, also inside of another one of the same object. The operating system drops the lock
    when the process ends, however it ends. Where the file cannot be made, or the file system has no locks, nothing is
    locked.

    Args:
        directory: the directory.

    Raises:
        CheckpointError: somebody else holds the lock.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / _NAME
        self._descriptor: int | None = None
        self._depth = 0

    def __enter__(self) -> DirectoryLock:
        if not self._depth:
            self._descriptor = self._open()
            if self._descriptor is not None:
                _held.add(self)
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth or self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        _held.discard(self)
        if sys.platform == "win32":  # which removes no open files
            os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        if sys.platform != "win32":
            os.close(descriptor)

    def forget(self) -> None:
        """Closes the file without giving up the lock of the process that this one was forked from."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int | None:
        """Returns the descriptor of the locked file; None where there can be none."""
        while True:
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError:  # whoever trains or saves here will be told why
                return None
            if not _lock(descriptor):
                owner = os.read(descriptor, 100).decode(errors="replace")
                os.close(descriptor)
                raise CheckpointError(
                    f"Another Trainer{f' (process {owner})' if owner else ''} is training or saving in the directory "
                    f"'{self._directory}'. Wait until it has ended, or use another directory."
                )
            # Whoever held the lock before removes the file: then it is that of nobody.
            with contextlib.suppress(FileNotFoundError):
                if sys.platform == "win32" or os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                    break
            os.close(descriptor)
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
        return descriptor


def _lock(descriptor: int) -> bool:
    """Locks an open file; returns False if it is locked already."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, _WINDOWS_OFFSET, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        finally:
            os.lseek(descriptor, 0, os.SEEK_SET)
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
