"""Saves the predictions of an unfinished epoch, which metric functions need at its end."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.errors import CheckpointError
from onnxtrain.runtime.atomic import FileSet
from onnxtrain.trainer._run.files import is_predictions
from onnxtrain.trainer._run.position import Position


def _name(position: Position) -> str:
    """Returns the name of the file with the predictions at a position, e.g. "predictions-2-10.npz".

    The name contains epoch and batch, so that a checkpoint never loads the predictions of a different position.
    """
    return f"predictions-{position.epoch}-{position.batch}.npz"


def write_predictions(files: FileSet, position: Position) -> None:
    """Adds the predictions and targets of the current epoch, if any, to a set of files."""
    if not position.averages.parts:
        return
    columns = [np.concatenate(arrays) for arrays in zip(*position.averages.parts, strict=True)]
    with files.open(_name(position)) as file:
        # Concatenated, because metrics do not depend on the batches.
        named: dict[str, Any] = {f"column{index}": column for index, column in enumerate(columns)}
        np.savez(file, **named)


def remove_other_predictions(directory: Path, position: Position) -> None:
    """Removes the prediction files of other positions. Call it after the checkpoint has been written."""
    # A run resumed from an earlier save may leave files of later positions.
    kept = directory / _name(position)
    for path in directory.iterdir():
        # A user's file, e.g. "predictions-test.npz", is kept.
        if is_predictions(path.name) and (path != kept or not position.averages.parts):
            path.unlink(missing_ok=True)


def read_predictions(directory: Path, position: Position) -> None:
    """Restores the predictions of a position from the file that :func:`write_predictions` wrote.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    path = directory / _name(position)
    try:
        with np.load(path, allow_pickle=False) as content:
            position.averages.parts = [
                tuple(content[f"column{index}"] for index in range(len(content.files)))
            ]
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"Resuming from '{directory}': the predictions of the interrupted epoch, which metric "
            f"functions need, cannot be read from '{path.name}' ({error}). Copy the whole directory of the "
            "run."
        ) from error
