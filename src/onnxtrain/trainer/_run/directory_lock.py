"""Locks a run's directory while a trainer uses it."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import weakref
from pathlib import Path

from onnxtrain.errors import CheckpointError
from onnxtrain.runtime.atomic import open_regular

LOCK = ".onnxtrain-lock"
"""Name of the lock file in a run's directory."""

# Offset of the locked byte on Windows, beyond the text, because other processes cannot read locked bytes.
_WINDOWS_OFFSET = 2**20

_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _forget() -> None:
    """Closes the lock files that a forked process inherited, so that it does not hold its parent's locks."""
    for lock in list(_held):
        lock.forget()


# Windows has no fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class DirectoryLock:
    """Prevents other trainers, in any process, from training or saving in a directory.

    A context manager, which may be nested. The operating system releases the lock when the process ends, however it
    ends. If the lock file cannot be created (read-only directory) or locked (some network file systems), nothing is
    locked.

    Args:
        directory: directory to lock.

    Raises:
        CheckpointError: another trainer holds the lock, or the lock file is a link or a device.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / LOCK
        self._descriptor: int | None = None
        self._depth = 0

    def __enter__(self) -> DirectoryLock:
        # Nested, because a fit saves while it holds the lock.
        if not self._depth:
            self._descriptor = self._open()
            if self._descriptor is not None:
                _held.add(self)
        self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth or self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        _held.discard(self)
        # Windows cannot remove open files. Elsewhere, the file is removed while the lock is held, so that nobody locks
        # a removed file.
        if sys.platform == "win32":
            os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        if sys.platform != "win32":
            os.close(descriptor)

    def is_of_earlier_version(self) -> bool:
        """True if a killed trainer of a version that wrote settings only when it saved has left its lock file."""
        try:
            with os.fdopen(open_regular(self._path, os.O_RDONLY), "rb") as file:
                # Later versions end the process id with a line break.
                return file.read(100).isdigit()
        except OSError:
            return False

    def forget(self) -> None:
        """Closes the lock file that a forked process inherited; the parent keeps its lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int | None:
        """Opens and locks the lock file, and writes this process's id to it.

        Returns:
            The file descriptor; None if the lock file cannot be created or opened.

        Raises:
            CheckpointError: another trainer holds the lock, or the lock file is not a regular file.
        """
        while True:
            try:
                descriptor = self._descriptor_of_file()
            except OSError:
                # Training or saving then fails with a more specific message.
                return None
            if not _lock(descriptor):
                owner = os.read(descriptor, 100).decode(errors="replace")
                os.close(descriptor)
                raise CheckpointError(
                    f"Another Trainer{f' (process {owner.strip()})' if owner else ''} is training or saving in the "
                    f"directory '{self._directory}'. Wait until it has finished, or use another directory."
                )
            # The previous holder may have removed the file between open and lock; then lock a new file.
            with contextlib.suppress(FileNotFoundError):
                if sys.platform == "win32" or os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                    break
            os.close(descriptor)
        # On a full disk the process id is missing, which only affects an error message.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        return descriptor

    def _descriptor_of_file(self) -> int:
        """Opens the lock file; creates it if missing.

        Raises:
            CheckpointError: the lock file is not a regular file.
        """
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            pass
        try:
            return open_regular(self._path, os.O_RDWR)
        except FileNotFoundError:
            # Another trainer has just removed it.
            return self._descriptor_of_file()
        except OSError as error:
            # Writing through a link could overwrite any file.
            if error.errno not in (errno.EINVAL, errno.ELOOP):
                raise
            raise CheckpointError(
                f"Locking the directory '{self._directory}': '{LOCK}' is a symbolic link, a directory, a "
                "pipe or a device, not a regular file. It was not created by a Trainer; remove it."
            ) from error


def _lock(descriptor: int) -> bool:
    """Locks an open file; returns False if another process holds the lock."""
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
    except OSError:
        # E.g. NFS without a lock daemon.
        return True
    return True
