"""Replaces one or several files atomically: a killed process leaves either all old files or all new files.

New content is written to temporary files in the same directory, which are flushed to disk. A single file is then
renamed to its final name, which is atomic. For several files, the list of renames is first written to a journal in the
directory. Renaming the journal itself to its final name commits the new files. If the process is killed before that,
the old files remain. If it is killed afterwards, the journal remains, and the next reader or writer of the directory
completes the renames (:func:`finish_interrupted`).

Each time a large model is written, its external data gets a new file name. So a reader that ignores journals, e.g.
plain ONNX Runtime, never combines the new model with old data.

A directory may come from an untrusted source. Nothing here follows a symbolic link inside the directory of a
:class:`FileSet`, or blocks on a pipe there. Only :func:`replace_file`, whose path comes from the user, follows links
and writes to devices or pipes instead of replacing them.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import re
import stat
import sys
from collections.abc import Collection, Iterator, Sequence
from types import TracebackType
from typing import BinaryIO

from onnxtrain._printable import get_logger
from onnxtrain.runtime.json_text import parse_json

JOURNAL = ".onnxtrain-commit"
"""Name of the journal: JSON text `{"moves": [[temporary, final], ...], "remove": [name, ...]}`."""

_SUFFIX = ".onnxtrain-tmp"
# Glob pattern for the 12 random hexadecimal digits in the names of temporary files and external data.
_RANDOM = "[0-9a-f]" * 12
# Maximum number of bytes read from a journal: a file in an untrusted directory may have any size.
_MAX_JOURNAL = 2**20
# Names that a journal may remove: only files that this package writes, because a journal in an untrusted directory must
# not be able to delete other files.
_REMOVABLE = re.compile(r"best|.+\.[0-9a-f]{12}\.data", re.DOTALL)
# Errors by which file systems (network, FUSE) report that they cannot flush a directory.
_NO_SYNC = {
    errno.EINVAL,
    errno.EBADF,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EACCES,
    errno.EPERM,
}


def open_regular(path: str | os.PathLike[str], flags: int) -> int:
    """Opens an existing regular file; returns its descriptor.

    Args:
        path: the file. A symbolic link is not followed.
        flags: flags of :func:`os.open`, e.g. `os.O_RDWR`.

    Raises:
        OSError: there is no such file, or it is a symbolic link, a directory, a pipe or a device.
    """
    # Checked first, because opening a device can have side effects.
    if stat.S_ISREG(os.lstat(path).st_mode):
        # Windows has neither flag, so the check above must suffice.
        flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        return os.open(path, flags)
    raise OSError(errno.EINVAL, "it is a symbolic link, a directory, a pipe or a device", os.fspath(path))


def remove_special_file(path: str | os.PathLike[str]) -> None:
    """Removes `path` if it is a symbolic link, a pipe, a socket or a device, so that a write creates a new file.

    Call it before writing to a name not given by the user, in a directory from an untrusted source.
    """
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            os.unlink(path)


def is_stream(path: str | os.PathLike[str]) -> bool:
    """True if a path must be written to in place, not replaced by a rename: a device, a pipe or a socket.

    Links in /dev and /proc to open files count as well, e.g. /dev/stdout.

    >>> is_stream(os.devnull), is_stream("model.onnx")
    (True, False)
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        return True
    # /dev/stdout leads to whatever the shell has opened, e.g. a file, which must not be replaced by a rename.
    folder = os.path.realpath(os.path.dirname(os.path.abspath(path)))
    return os.path.islink(path) and (folder == "/dev" or folder.startswith("/proc/"))


def _lock(descriptor: int, *, wait: bool = False) -> bool:
    """Locks an open file or directory until it is closed or the process dies.

    Returns:
        True if it is locked. False if the file system does not support locks, or if `wait` is False and another process
        holds the lock.
    """
    # Windows needs no lock: a file that another process has open cannot be removed.
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _unlock(descriptor: int) -> None:
    """Unlocks an open file or directory."""
    # Closing is not sufficient: a forked process may still have the file open and shares the lock.
    if sys.platform != "win32":
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextlib.contextmanager
def _exclusive(directory: str) -> Iterator[None]:
    """Context manager that locks a directory, if possible, so that no other onnxtrain process renames files in it."""
    descriptor = None
    if sys.platform != "win32":
        # A directory may be writable but not readable; saving there works, but without the lock.
        with contextlib.suppress(PermissionError):
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
    """Creates a locked, empty temporary file in the directory of `path`.

    Returns:
        The path and the file descriptor of the temporary file.
    """
    directory, name = os.path.split(path)
    while True:
        temporary = os.path.join(directory, f".{name}.{os.urandom(6).hex()}{_SUFFIX}")
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0)
        descriptor = os.open(temporary, flags, 0o666)
        # Between creation and locking, another save may take the file for a leftover and remove it. That save holds the
        # lock until the file is removed, so the check must wait for the lock. Without waiting, about one in eight runs
        # of the test with four saving threads lost a file.
        _lock(descriptor, wait=True)
        if os.path.exists(temporary):
            return temporary, descriptor
        os.close(descriptor)


def _remove_leftovers(path: str, kept: Collection[str] = ()) -> None:
    """Removes temporary files, except `kept`, that a process left behind if it was killed while saving `path`.

    This includes the temporary files of the external data of `path`.
    """
    directory, name = os.path.split(path)
    start = os.path.join(glob.escape(directory), f".{glob.escape(name)}")
    temporaries = {
        *glob.glob(f"{start}.{_RANDOM}{_SUFFIX}"),
        *glob.glob(f"{start}.{_RANDOM}.data.{_RANDOM}{_SUFFIX}"),
    }
    for leftover in temporaries - set(kept):
        with contextlib.suppress(OSError):
            descriptor = open_regular(leftover, os.O_WRONLY)
            try:
                # A running save holds the lock of its temporary file.
                if _lock(descriptor) and sys.platform != "win32":
                    os.unlink(leftover)
            finally:
                os.close(descriptor)
            # Windows does not remove open files, including those of running saves.
            if sys.platform == "win32":
                os.unlink(leftover)


def _sync_directory(directory: str) -> None:
    """Flushes a directory to disk, so that renames in it survive a power failure."""
    # Windows cannot open directories, and flushes renames itself.
    if sys.platform == "win32":
        return
    try:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        # The files are complete and renamed, so the save has not failed, and a warning suffices.
        if error.errno not in _NO_SYNC:
            # Imported here, as in several places of the runtime: a device does not need it to start.

            get_logger().warning(
                "saved, but flushing '%s' failed: %s; a power failure may undo it", directory, error
            )


def rename_directory(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Renames a directory to a name that is not in use, and flushes the rename to disk.

    Raises:
        OSError: the directory cannot be renamed.
    """
    os.rename(source, target)
    _sync_directory(os.path.dirname(os.path.abspath(os.fspath(target))))


def external_data_name(model: str) -> str:
    """Returns a new name for the external data of a model file, e.g. "net.onnx.0123456789ab.data" for "net.onnx".

    >>> import re
    >>> bool(re.fullmatch(r"net[.]onnx[.][0-9a-f]{12}[.]data", external_data_name("net.onnx")))
    True
    """
    return f"{model}.{os.urandom(6).hex()}.data"


def _is_name(name: object) -> bool:
    """True if a value is a string that can name a file in the same directory: not a path, "." or ".."."""
    return isinstance(name, str) and name not in ("", ".", "..") and not re.search(r"[/\\\0]", name)


def _parse_journal(text: bytes) -> tuple[list[tuple[str, str]], list[str]]:
    """Parses a journal: the file that lists the remaining renames and removals of a save.

    The journal may come from an untrusted source.

    Returns:
        The renames, as pairs of temporary and final names, and the names of the files to remove.

    Raises:
        ValueError: the journal is not valid JSON, contains a path instead of a name, renames a file that is not one of
            this package's temporary files, or removes a file other than "best" and external data.
        KeyError, TypeError: the JSON text has a different structure.
    """
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


def _apply_journal(
    directory: str, moves: Sequence[tuple[str, str]], removals: Sequence[str], *, again: bool = False
) -> None:
    """Performs the renames and removals of a journal, then removes the journal.

    Args:
        directory: directory of the journal.
        moves: pairs of temporary and final names.
        removals: names of the files to remove.
        again: True if an interrupted process may already have performed some of the renames.
    """
    for temporary, name in moves:
        try:
            os.replace(os.path.join(directory, temporary), os.path.join(directory, name))
        except FileNotFoundError:
            if not again:
                raise
    for name in removals:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, name))
    # In this order: a journal that disappears before the renames are on disk could not complete them.
    _sync_directory(directory)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, JOURNAL))


def _finish(directory: str) -> None:
    """Performs the renames and removals in a directory's journal, if there is one. The caller holds the lock."""
    path = os.path.join(directory, JOURNAL)
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
            text = file.read(_MAX_JOURNAL)
        moves, removals = _parse_journal(text)
        for temporary, _ in moves:
            # Saves never create links. Renamed, a link would replace a file.
            if os.path.islink(os.path.join(directory, temporary)):
                raise ValueError(f"it names the symbolic link {temporary!r}")
        _apply_journal(directory, moves, removals, again=True)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OSError(
            error.errno,
            f"an interrupted save in '{directory}' cannot be completed ({error}); open the directory once "
            "where it is writable",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(
            errno.EINVAL,
            f"'{path}', the record of an interrupted save, is corrupt ({error}); if the other files are "
            "complete, delete it",
        ) from error


def finish_interrupted(path: str | os.PathLike[str]) -> None:
    """Completes an interrupted save in the directory of the file `path`, if its journal was already committed.

    If `path` is a symbolic link, this includes the directory of its target. Call the function before reading a file
    that is part of a :class:`FileSet`, e.g. a checkpoint.

    Raises:
        OSError: the journal is corrupt, or its renames cannot be performed, e.g. because the directory is not writable.
    """
    path = os.path.abspath(os.fspath(path))
    # A link and its target may be in different directories.
    for directory in {os.path.dirname(path), os.path.dirname(os.path.realpath(path))}:
        # Checked first: directories without a journal are read without a lock, and may be read-only.
        if os.path.lexists(os.path.join(directory, JOURNAL)):
            with _exclusive(directory):
                _finish(directory)


class FileSet:
    """Replaces several files of a directory atomically: either all of them or none.

    Use it in a `with` statement. The new files replace the old ones when the statement ends without an exception; if
    there is an exception, nothing changes. A symbolic link is replaced, not followed. When a model is replaced, its old
    external data (see :func:`external_data_name`) is removed.

    Args:
        directory: directory of the files; it must exist.

    Raises:
        OSError: the directory is missing or not writable, or the disk is full. The old files are not modified.
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
        """Opens a temporary binary file for the new content of the file `name`. Each name can be opened once."""
        if not _is_name(name) or name in self._temporaries:
            raise ValueError(f"'{name}' is not a file name, or was already written")
        path = os.path.join(self._directory, name)
        if os.path.isdir(path) and not os.path.islink(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        with _exclusive(self._directory):
            # First, because temporary files named in a journal are new content, not leftovers.
            _finish(self._directory)
            _remove_leftovers(path, [temporary for temporary, _ in self._temporaries.values()])
        temporary, descriptor = _create_temporary(path)
        file = os.fdopen(descriptor, "wb")
        self._temporaries[name] = temporary, file
        yield file
        file.flush()
        os.fsync(file.fileno())
        # Windows cannot rename open files. Elsewhere, the file remains open, and thus locked, until it is renamed.
        if sys.platform == "win32":
            file.close()

    def copy(self, source: str | os.PathLike[str], name: str) -> None:
        """Copies the content of the file `source` to the file `name` of the set."""
        with open(source, "rb") as original, self.open(name) as file:
            while chunk := original.read(2**20):
                file.write(chunk)

    def remove(self, name: str) -> None:
        """Schedules the file `name`, if it exists, for removal when the new files replace the old ones.

        Raises:
            ValueError: `name` is neither "best" nor the name of external data.
        """
        if not _REMOVABLE.fullmatch(name):
            raise ValueError(f"'{name}' is not among the files that can be removed")
        self._removals.add(name)

    def _commit(self) -> None:
        """Renames the new files to their final names, and removes old external data and the files to be removed."""
        moves = [(os.path.basename(temporary), name) for name, (temporary, _) in self._temporaries.items()]
        with _exclusive(self._directory):
            _finish(self._directory)
            # No reader needs the external data of the replaced model once the new model exists.
            for name in self._temporaries:
                pattern = f"{glob.escape(name)}.{_RANDOM}.data"
                self._removals.update(glob.glob(pattern, root_dir=self._directory))
            exists = os.path.lexists
            removals = sorted(
                name
                for name in self._removals - self._temporaries.keys()
                if exists(os.path.join(self._directory, name))
            )
            # A single rename is atomic and needs no journal.
            if len(moves) + len(removals) > 1:
                self._write_journal(moves, removals)
            try:
                _apply_journal(self._directory, moves, removals)
            except OSError:
                # If nothing has been renamed, removing the journal restores the old files. After the first rename, the
                # journal must remain, so that the next reader completes the set.
                if all(os.path.exists(temporary) for temporary, _ in self._temporaries.values()):
                    with contextlib.suppress(OSError):
                        os.unlink(os.path.join(self._directory, JOURNAL))
                raise

    def _write_journal(self, moves: list[tuple[str, str]], removals: list[str]) -> None:
        """Writes the journal and renames it to its final name, which commits the new files."""
        path = os.path.join(self._directory, JOURNAL)
        _remove_leftovers(path)
        temporary, descriptor = _create_temporary(path)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(json.dumps({"moves": moves, "remove": removals}).encode())
                file.flush()
                os.fsync(file.fileno())
            # After a power failure, a journal must not contain temporary files that never reached the disk.
            _sync_directory(self._directory)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        _sync_directory(self._directory)

    def _release(self) -> None:
        """Closes the temporary files, and removes them unless a journal still has to rename them."""
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
    """Opens a temporary binary file, which replaces the file `uri` when the block ends without an exception.

    If the process is killed, `uri` has either the old or the new content, and the next save of the same `uri` removes
    the temporary file. If `uri` is a symbolic link, its target is replaced. A device, pipe or socket is not replaced:
    the content is appended to it when the block ends.

    Args:
        uri: path that the user has chosen. For a file in the directory of a training run, use :class:`FileSet`, which
            does not follow symbolic links.

    Raises:
        OSError: the directory is missing or not writable, or the disk is full. The old content is not modified.
    """
    if is_stream(uri):
        # Imported here, because few devices write to pipes. The content is collected first, so that a block that fails
        # writes nothing.
        import shutil
        import tempfile

        with tempfile.TemporaryFile() as content:
            yield content
            content.seek(0)
            # Appended, because /dev/stdout may be a file to which the shell has already written.
            with open(uri, "ab") as stream:
                shutil.copyfileobj(content, stream)
        return
    directory, name = os.path.split(os.path.realpath(os.fspath(uri)))
    with FileSet(directory) as files, files.open(name) as file:
        yield file
