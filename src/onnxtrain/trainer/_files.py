"""Finds the files of a training run by its manifest."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from onnxtrain._words import argument
from onnxtrain.errors import CheckpointError, ModelLoadError
from onnxtrain.runtime.artifact_folder import MANIFEST, find_manifest
from onnxtrain.runtime.json_text import parse_json

_DEFAULTS = {
    "training_model": "training_model.onnx",
    "eval_model": "eval_model.onnx",
    "optimizer_model": "optimizer_model.onnx",
    "checkpoint": "checkpoint",
    "inference_model": "inference_model.onnx",
}
# Artifacts of earlier versions have no inference model.
_OPTIONAL = {"optimizer_model", "inference_model"}


@dataclass(frozen=True)
class Files:
    """Names of a run's files, relative to its directory.

    Attributes:
        manifest: description of the models, e.g. "manifest.json".
        training_model, eval_model, optimizer_model: names of the models, e.g. "training_model.onnx".
        checkpoint: file of the weights, e.g. "checkpoint".
        inference_model: model that predicts; None in artifacts of earlier versions.
    """

    manifest: str
    training_model: str
    eval_model: str
    optimizer_model: str
    checkpoint: str
    inference_model: str | None = None


def find_files(directory: Path) -> Files:
    """Reads the names of a run's files from its manifest.

    Without a manifest beside the models, which contain it as well, the files have the usual names.

    Raises:
        CheckpointError: The directory holds no run, several runs, or one without an optimizer.
        ModelLoadError: The manifest is damaged.
    """
    manifest = find_manifest(directory)
    files = _read(directory / manifest) if manifest is not None else _DEFAULTS
    if "optimizer_model" not in files:
        raise CheckpointError(
            f"Opening the training run in '{directory}': it has no optimizer model. Generate the artifacts with "
            f"{argument('optimizer', 'adamw')}."
        )
    if not (directory / files["checkpoint"]).is_file():
        # ModelCheckpoint saves to directories inside of the one that users pass.
        inside = sorted(path.parent for path in directory.glob(f"*/{files['checkpoint']}"))
        example = f", such as '{inside[-1]}'" if inside else ""
        raise CheckpointError(
            f"Opening the training run in '{directory}': there is no file '{files['checkpoint']}'. Pass a directory "
            f"that Trainer.save or generate_artifacts has written{example}."
        )
    return Files(manifest=manifest or MANIFEST, **files)


def _read(path: Path) -> dict[str, str]:
    """Reads the names of the files by their roles, e.g. {"checkpoint": "checkpoint"}."""
    try:
        files = parse_json(path.read_bytes())["files"]
        named = {role: files[role] for role in _DEFAULTS if files.get(role) is not None}
        # A name with directories could make a run read, or later replace, files outside of its directory.
        wrong = [name for name in named.values() if name in (".", "..") or Path(name).name != name]
        # Linux, macOS and Windows allow names of 255 bytes. `fsencode` raises ValueError for text that none can encode.
        wrong += [name for name in named.values() if len(os.fsencode(name)) > 255]
        if wrong or not _DEFAULTS.keys() - _OPTIONAL <= named.keys():
            raise ValueError(f"files {files}")
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelLoadError(
            f"Opening the training run in '{path.parent}': its manifest '{path.name}' is damaged "
            f"({type(error).__name__}: {error}). Generate the artifacts again."
        ) from error
    return named
