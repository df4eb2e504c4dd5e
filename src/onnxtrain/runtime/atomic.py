"""Files that are replaced whole or not at all, one or several together, whenever the process dies.

New content goes to temporary files in the same directory, which are flushed to the disk. One file is then renamed,
which is atomic. Several take their places together: what is to be renamed is written to a journal in their
directory, and the rename that puts the journal there is the moment at which the new files count. If the process
is killed before it, the old files are there, untouched; if after it, the renames that were left are made by
whoever reads or writes in the directory next (:func:`finish_interrupted`).

Data of a model that is too large for one file has a name that no file had before, so that a reader that knows
nothing of journals never finds the data of one model beside another.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from types import TracebackType
from typing import BinaryIO

from onnxtrain.runtime.json_text import parse_json

JOURNAL = ".onnxtrain-commit"
"""Name of the journal: JSON text `{"moves": [[temporary, final], ...], "remove": [name, ...]}`."""

_SUFFIX = ".onnxtrain-tmp"
_RANDOM = "[0-9a-f]" * 12
_MAX_JOURNAL = 2**20
# What a journal may remove: what this package alone writes, should the directory come from somewhere else.
_REMOVABLE = re.compile(r"best|.+\.[0-9a-f]{12}\.data", re.DOTALL)
_NO_SYNC = {
    errno.EINVAL,
    errno.EBADF,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EACCES,
    errno.EPERM,
}


def _lock(descriptor: int, *, wait: bool = False) -> bool:
    """Takes the lock of an open file or directory; the kernel drops it when the process dies.

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


def _unlock(descriptor: int) -> None:
    """Drops the lock, also where a forked process has the file open still."""
    if sys.platform != "win32":
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextlib.contextmanager
def _exclusive(directory: str) -> Iterator[None]:
    """Keeps others of this package from renaming in `directory`, where directories can be locked."""
    descriptor = None
    if sys.platform != "win32":
        with contextlib.suppress(PermissionError):  # a directory that may be written but not listed
            descriptor = os.open(directory, os.O_RDONLY)
    if descriptor is None:
        yield
        return
    try:
        _lock(descriptor, wait=True)
        yield
    finally:
        _unlock(descriptor)
        os.close(descriptor)


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


def _remove_leftovers(path: str, kept: Collection[str] = ()) -> None:
    """Removes temporary files of killed saves of `path` and its external data, but not the `kept` ones.

    Those of running saves are locked and stay.
    """
    directory, name = os.path.split(path)
    start = os.path.join(glob.escape(directory), f".{glob.escape(name)}")
    found = {
        *glob.glob(f"{start}.{_RANDOM}{_SUFFIX}"),
        *glob.glob(f"{start}.{_RANDOM}.data.{_RANDOM}{_SUFFIX}"),
    }
    for leftover in found - set(kept):
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
    """Makes renames in `directory` durable.

    Windows, which cannot open directories, does that itself; so do file systems that refuse to flush them. The
    files are complete and in their places in any case, so that nothing here makes a save a failed one.
    """
    if sys.platform == "win32":
        return
    try:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            import logging  # kept out of the time that a device takes to start

            logging.getLogger("onnxtrain").warning(
                "saved, but flushing '%s' failed: %s; a power failure may undo it", directory, error
            )


def rename_directory(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Renames a directory to a name that is free, durably.

    Raises:
        OSError: It cannot be renamed.
    """
    os.rename(source, target)
    _sync_directory(os.path.dirname(os.path.abspath(os.fspath(target))))


def external_data_name(model: str) -> str:
    """Returns a new name for the external data of a model file named `model`, in the same directory.

    >>> import re
    >>> bool(re.fullmatch(r"net[.]onnx[.][0-9a-f]{12}[.]data", external_data_name("net.onnx")))
    True
    """
    return f"{model}.{os.urandom(6).hex()}.data"


def _external_data_of(directory: str, model: str) -> list[str]:
    """Returns the files that were given an :func:`external_data_name` for `model`."""
    pattern = f"{glob.escape(model)}.{_RANDOM}.data"
    return glob.glob(pattern, root_dir=directory)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not re.search(r"[/\\\0]", name)


def _parse_journal(text: bytes) -> tuple[list[tuple[str, str]], list[str]]:
    """Returns moves and removals of a journal, which never reach beyond its directory."""
    content = parse_json(text)
    moves = [(temporary, name) for temporary, name in content["moves"]]
    removals = list(content["remove"])
    for temporary, name in moves:
        if not _is_name(name) or not re.fullmatch(
            rf"\.{re.escape(name)}\.[0-9a-f]{{12}}{re.escape(_SUFFIX)}", temporary
        ):
            raise ValueError(f"it renames {temporary!r} to {name!r}")
    for name in removals:
        if not _is_name(name) or not _REMOVABLE.fullmatch(name):
            raise ValueError(f"it removes {name!r}")
    return moves, removals


def _carry_out(
    directory: str, moves: Sequence[tuple[str, str]], removals: Sequence[str], *, again: bool = False
) -> None:
    """Does what a journal says, `again` as far as it has not been done, and removes the journal."""
    for temporary, name in moves:
        try:
            os.replace(os.path.join(directory, temporary), os.path.join(directory, name))
        except FileNotFoundError:
            if not again:
                raise
    for name in removals:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, name))
    _sync_directory(directory)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, JOURNAL))


def _finish(directory: str) -> None:
    """Carries out the journal in `directory`, which the caller has locked, if there is one."""
    path = os.path.join(directory, JOURNAL)
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_JOURNAL)
        moves, removals = _parse_journal(text)
        _carry_out(directory, moves, removals, again=True)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OSError(
            error.errno,
            f"a save in '{directory}' was interrupted, and what is left of it cannot be done ({error}); open the "
            "directory once where it can be written",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(
            errno.EINVAL,
            f"'{path}' should say what is left of a save that was interrupted, but is corrupt ({error}); if the "
            "other files are complete, delete it",
        ) from error


def finish_interrupted(path: str | os.PathLike[str]) -> None:
    """Makes the directory of the file `path` what a save that was killed in the middle wanted it to be.

    To be called before a file that is saved together with others is read.

    Raises:
        OSError: There is something left to do, and it cannot be done.
    """
    path = os.path.abspath(os.fspath(path))
    for directory in {os.path.dirname(path), os.path.dirname(os.path.realpath(path))}:
        if os.path.lexists(os.path.join(directory, JOURNAL)):
            with _exclusive(directory):
                _finish(directory)


class FileSet:
    """New contents of files of one directory, which take their places together or not at all.

    Used in a `with` statement: the new files are in place when it ends without an exception, else nothing has
    changed. A symbolic link is replaced by the file. Generations of external data of a file that is written
    (:func:`external_data_name`) which are not of the set are removed.

    Args:
        directory: Where the files are; it must exist.

    Raises:
        OSError: The directory is missing or not writable, or the disk is full. The old files are untouched.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = os.path.realpath(os.fspath(directory))
        self._temporaries: dict[str, tuple[str, BinaryIO]] = {}
        self._removals: set[str] = set()

    def __enter__(self) -> FileSet:
        finish_interrupted(os.path.join(self._directory, JOURNAL))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            self._release()

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Yields a binary file with the new content of the file `name`, to be written once."""
        if not _is_name(name) or name in self._temporaries:
            raise ValueError(f"'{name}' is no name of a file, or was written already")
        path = os.path.join(self._directory, name)
        if os.path.isdir(path) and not os.path.islink(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        with _exclusive(self._directory):
            _finish(self._directory)  # its temporary files are no leftovers
            _remove_leftovers(path, [temporary for temporary, _ in self._temporaries.values()])
        temporary, descriptor = _create_temporary(path)
        file = os.fdopen(descriptor, "wb")
        self._temporaries[name] = temporary, file
        yield file
        file.flush()
        os.fsync(file.fileno())
        if sys.platform == "win32":  # cannot rename open files; elsewhere the lock is held until after it
            file.close()

    def copy(self, source: str | os.PathLike[str], name: str) -> None:
        """Makes the content of the file `source` that of the file `name`."""
        with open(source, "rb") as original, self.open(name) as file:
            while chunk := original.read(2**20):
                file.write(chunk)

    def remove(self, name: str) -> None:
        """Removes the file `name`, if it is there, when the new files take their places."""
        if not _REMOVABLE.fullmatch(name):
            raise ValueError(f"'{name}' is not among the files that can be removed")
        self._removals.add(name)

    def _commit(self) -> None:
        moves = [(os.path.basename(temporary), name) for name, (temporary, _) in self._temporaries.items()]
        with _exclusive(self._directory):
            _finish(self._directory)
            for name in self._temporaries:
                self._removals.update(_external_data_of(self._directory, name))
            exists = os.path.lexists
            removals = sorted(
                name
                for name in self._removals - self._temporaries.keys()
                if exists(os.path.join(self._directory, name))
            )
            if len(moves) + len(removals) > 1:
                self._write_journal(moves, removals)
            try:
                _carry_out(self._directory, moves, removals)
            except OSError:
                if all(os.path.exists(temporary) for temporary, _ in self._temporaries.values()):
                    with contextlib.suppress(OSError):  # nothing has been renamed, and nothing will be
                        os.unlink(os.path.join(self._directory, JOURNAL))
                raise

    def _write_journal(self, moves: list[tuple[str, str]], removals: list[str]) -> None:
        """Puts the journal into the directory: from here on the new files count."""
        path = os.path.join(self._directory, JOURNAL)
        _remove_leftovers(path)
        temporary, descriptor = _create_temporary(path)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(json.dumps({"moves": moves, "remove": removals}).encode())
                file.flush()
                os.fsync(file.fileno())
            _sync_directory(self._directory)  # the temporary files are there before the journal names them
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        _sync_directory(self._directory)

    def _release(self) -> None:
        """Removes the temporary files that are left, unless a journal names them, and drops their locks."""
        pending = os.path.lexists(os.path.join(self._directory, JOURNAL))
        for temporary, file in self._temporaries.values():
            with contextlib.suppress(OSError):
                file.close()
            if not pending:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
        self._temporaries.clear()


@contextlib.contextmanager
def replace_file(uri: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yields a binary file whose content replaces that of `uri` when the block ends without an exception.

    A process that is killed at any moment leaves the old content or the new one, complete; a temporary file
    that it leaves behind is removed by the next save of the same `uri`. A symbolic link stays and its target
    is replaced.

    Raises:
        OSError: the directory is missing or not writable, or the disk is full. The old content is untouched.
    """
    directory, name = os.path.split(os.path.realpath(os.fspath(uri)))
    with FileSet(directory) as files, files.open(name) as file:
        yield file
