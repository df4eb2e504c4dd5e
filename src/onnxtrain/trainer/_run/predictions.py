"""Saves the predictions of an unfinished epoch, which metric functions need when the epoch ends."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from onnxtrain.errors import CheckpointError
from onnxtrain.runtime.atomic import FileSet
from onnxtrain.trainer._run.files import is_predictions
from onnxtrain.trainer._run.position import Position


def _name(position: Position) -> str:
    """Names the file after the position, so that it never belongs to another checkpoint."""
    return f"predictions-{position.epoch}-{position.batch}.npz"


def write_predictions(files: FileSet, position: Position) -> None:
    """Writes predictions and targets of the current epoch, if any, in one set with the checkpoint."""
    if not position.averages.parts:
        return
    prediction, target = (np.concatenate(arrays) for arrays in zip(*position.averages.parts, strict=True))
    with files.open(_name(position)) as file:
        # Batches are joined: which one a prediction came from does not matter to a metric.
        np.savez(file, prediction=prediction, target=target)


def remove_other_predictions(directory: Path, position: Position) -> None:
    """Removes files of other positions; call it after the checkpoint has been written."""
    # A run that went back to an earlier save leaves a file of a later position behind.
    kept = directory / _name(position)
    for path in directory.iterdir():
        # A file "predictions-test.npz" of the user stays.
        if is_predictions(path.name) and (path != kept or not position.averages.parts):
            path.unlink(missing_ok=True)


def read_predictions(directory: Path, position: Position) -> None:
    """Reads the file of :func:`write_predictions`. Raises CheckpointError: it is missing or damaged."""
    path = directory / _name(position)
    try:
        with np.load(path, allow_pickle=False) as content:
            position.averages.parts = [(content["prediction"], content["target"])]
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"Resuming from '{directory}': the predictions of the epoch under way, which metric functions need, "
            f"cannot be read from '{path.name}' ({error}). Copy the whole directory of a run."
        ) from error
