"""Sends a run's files from worker 0 to the other workers, so that they need no shared file system."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath

import numpy as np

from onnxtrain.distributed._communicator import Communicator
from onnxtrain.errors import WorkersError
from onnxtrain.trainer._run.files import AVERAGE, is_predictions
from onnxtrain.trainer._run.run import Run

# Bytes per message, so that a model of many gigabytes is never entirely in memory.
_CHUNK = 64 * 2**20


def run_files(run: Run) -> list[str]:
    """Returns the files that a worker needs to open a run, relative to the run's directory."""
    directory = run.directory
    files = [path for group in run.model_files() for path in group]
    files.append(directory / run.files.checkpoint)
    files += [path for path in directory.iterdir() if path.name == AVERAGE or is_predictions(path.name)]
    # Models may share an external data file.
    return list(dict.fromkeys(path.relative_to(directory).as_posix() for path in files))


def send_files(communicator: Communicator, directory: Path, names: Sequence[str]) -> None:
    """Sends files from worker 0 to the other workers, which must call :func:`receive_files` at the same time.

    Args:
        communicator: connection to the other workers.
        directory: directory of the files.
        names: paths of the files relative to `directory`.
    """
    communicator.share([(name, (directory / name).stat().st_size) for name in names])
    if communicator.size == 1:
        return
    for name in names:
        with open(directory / name, "rb") as file:
            while chunk := file.read(_CHUNK):
                communicator.broadcast([np.frombuffer(bytearray(chunk), np.uint8)])


def receive_files(communicator: Communicator, directory: Path) -> None:
    """Receives the files that worker 0 sends with :func:`send_files`, and writes them to a directory.

    Raises:
        WorkersError: a file name points outside the directory.
    """
    for name, size in communicator.share():
        # External data may be in a subdirectory, but a name from the network must not leave the directory.
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise WorkersError(
                f"Worker 0 sent a file named {name!r}, which lies outside the run's directory."
            )
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            for start in range(0, size, _CHUNK):
                chunk = np.empty(min(_CHUNK, size - start), np.uint8)
                communicator.broadcast([chunk])
                file.write(chunk.tobytes())
