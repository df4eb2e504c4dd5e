"""The predictions of an unfinished epoch in a file of their own, which metric functions wait for."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from onnxtrain.errors import CheckpointError
from onnxtrain.runtime.atomic import replace_file
from onnxtrain.trainer._position import Position

__all__ = ["read_predictions", "remove_other_predictions", "write_predictions"]

_PATTERN = "predictions-*.npz"


def _path(directory: Path, position: Position) -> Path:
    """One name per position: a file never belongs to another checkpoint than the one that was written after it."""
    return directory / f"predictions-{position.epoch}-{position.batch}.npz"


def write_predictions(directory: Path, position: Position) -> None:
    """Writes the predictions and targets of the current epoch, if there are any; to be done before the checkpoint."""
    if not position.averages.parts:
        return
    prediction, target = (np.concatenate(arrays) for arrays in zip(*position.averages.parts, strict=True))
    with replace_file(_path(directory, position)) as file:
        np.savez(file, prediction=prediction, target=target)


def remove_other_predictions(directory: Path, position: Position) -> None:
    """Removes files of other positions; to be done after the checkpoint."""
    kept = _path(directory, position)
    for path in directory.glob(_PATTERN):
        if path != kept or not position.averages.parts:
            path.unlink(missing_ok=True)


def read_predictions(directory: Path, position: Position) -> None:
    """Puts back what :func:`write_predictions` has written.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    path = _path(directory, position)
    try:
        with np.load(path, allow_pickle=False) as content:
            position.averages.parts = [(content["prediction"], content["target"])]
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"Resuming from '{directory}': the predictions of the epoch under way, which metric functions need, "
            f"cannot be read from '{path.name}' ({error}). Copy the whole directory of a run."
        ) from error
