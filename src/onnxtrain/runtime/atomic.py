"""Files that are replaced whole or not at all, whenever the process dies."""

from __future__ import annotations

import contextlib
import glob
import os
import sys
from collections.abc import Iterator
from typing import BinaryIO

_SUFFIX = ".onnxtrain-tmp"


def _lock(descriptor: int, *, wait: bool = False) -> bool:
    """Takes the lock that marks a temporary file as in use; the kernel drops it when its process dies.

    Returns whether it is held: not without `wait` if somebody else has it, nor where there are no locks.

    Windows needs none: a file that another process has open cannot be removed there.
    """
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _create_temporary(path: str) -> tuple[str, int]:
    """Returns name and descriptor of a new, locked, empty file beside `path`."""
    directory, name = os.path.split(path)
    while True:
        temporary = os.path.join(directory, f".{name}.{os.urandom(6).hex()}{_SUFFIX}")
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0)
        descriptor = os.open(temporary, flags, 0o666)
        # Another save may have taken the file for a leftover between its creation and its lock. That save holds
        # the lock until it has removed the file, so whether the file is there is certain only after it.
        _lock(descriptor, wait=True)
        if os.path.exists(temporary):
            return temporary, descriptor
        os.close(descriptor)


def _remove_leftovers(path: str) -> None:
    """Removes temporary files of killed saves of `path`; those of running saves are locked and stay."""
    directory, name = os.path.split(path)
    pattern = os.path.join(glob.escape(directory), f".{glob.escape(name)}.*{_SUFFIX}")
    for leftover in glob.glob(pattern):
        with contextlib.suppress(OSError):
            descriptor = os.open(leftover, os.O_WRONLY)
            try:
                if _lock(descriptor) and sys.platform != "win32":
                    os.unlink(leftover)
            finally:
                os.close(descriptor)
            if sys.platform == "win32":
                os.unlink(leftover)


def _sync_directory(directory: str) -> None:
    """Makes a rename in `directory` durable; Windows, which cannot open directories, does that itself."""
    if sys.platform == "win32":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replace_file(uri: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yields a binary file whose content replaces that of `uri` when the block ends without an exception.

    The content goes to a temporary file in the same directory, which is flushed to the disk and then renamed.
    A process that is killed at any moment leaves the old content or the new one, complete; a temporary file
    that it leaves behind is removed by the next save of the same `uri`. A symbolic link stays and its target
    is replaced.

    Raises:
        OSError: the directory is missing or not writable, or the disk is full. The old content is untouched.
    """
    path = os.path.realpath(os.fspath(uri))
    _remove_leftovers(path)
    temporary, descriptor = _create_temporary(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if sys.platform != "win32":  # renamed while locked, so that no other save can remove it before
                os.replace(temporary, path)
        if sys.platform == "win32":
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_directory(os.path.dirname(path))
