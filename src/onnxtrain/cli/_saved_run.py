"""Reads the progress of the run in a directory, without opening its models."""

from __future__ import annotations

from pathlib import Path

from onnxtrain.runtime.artifact_folder import own_file
from onnxtrain.runtime.atomic import finish_interrupted
from onnxtrain.runtime.checkpoint import read_checkpoint
from onnxtrain.runtime.state import CheckpointState, Properties
from onnxtrain.trainer._run.files import CHECKPOINT
from onnxtrain.trainer._run.position import PROPERTY, Position


def saved_properties(directory: Path) -> Properties | None:
    """Returns the properties in a run's checkpoint; None if there is no checkpoint.

    If saving was interrupted between two renames, the save is completed first.

    Raises:
        CheckpointError: the checkpoint is corrupt, or a symbolic link that points outside the directory.
        OSError: the checkpoint cannot be read.
    """
    path = own_file(directory, CHECKPOINT)
    finish_interrupted(path)
    return CheckpointState(read_checkpoint(path)).properties if path.exists() else None


def saved_position(properties: Properties, directory: Path) -> Position | None:
    """Reads the position in the training run from a checkpoint's properties; None for untrained artifacts.

    Raises:
        CheckpointError: the position is corrupt.
    """
    if PROPERTY not in properties:
        return None
    return Position.from_json(str(properties[PROPERTY]), f"'{directory}'")[0]
