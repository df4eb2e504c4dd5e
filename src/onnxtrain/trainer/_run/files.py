"""Defines the names of a run's files, finds them through its manifest, and distinguishes them from users' files."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from onnxtrain._words import argument, words
from onnxtrain.errors import CheckpointError, InputError, ModelLoadError
from onnxtrain.runtime.artifact_folder import MANIFEST, find_manifest, is_manifest, own_file
from onnxtrain.runtime.json_text import parse_json

_DEFAULTS = {
    "training_model": "training_model.onnx",
    "eval_model": "eval_model.onnx",
    "optimizer_model": "optimizer_model.onnx",
    "checkpoint": "checkpoint",
    "inference_model": "inference_model.onnx",
}
# A model whose only output is its loss has no inference model.
_OPTIONAL = {"optimizer_model", "inference_model"}

CHECKPOINT = "checkpoint"
"""Name of the checkpoint in the directory of a trainer's own run."""

BEST = "best"
"""File in a run's directory with the parameters of the best epoch."""

AVERAGE = "average"
"""File in a run's directory with the averages of `ema_decay`: safetensors, with the keys of a checkpoint."""

SWA_AVERAGE = "swa"
"""File in a run's directory with the averages of the callback `SWA`."""

# Predictions of an unfinished epoch; the name contains epoch and batch.
_PREDICTIONS = re.compile(r"predictions-\d+-\d+\.npz")


@dataclass(frozen=True)
class Files:
    """Names of a run's files, relative to its directory.

    Attributes:
        manifest: name of the manifest, e.g. "manifest.json".
        training_model, eval_model, optimizer_model: names of the models, e.g. "training_model.onnx".
        checkpoint: name of the checkpoint, e.g. "checkpoint".
        inference_model: name of the inference model; None if the model's only output is its loss.
    """

    manifest: str
    training_model: str
    eval_model: str
    optimizer_model: str
    checkpoint: str
    inference_model: str | None = None


def find_files(directory: Path) -> Files:
    """Returns the names of a run's files, as listed in its manifest.

    Without a manifest file, returns the default names. Such a run can be opened, because each model contains a copy of
    the manifest.

    Raises:
        CheckpointError: the directory contains no run, several runs, or a run without an optimizer model; or one of the
            names is a directory, a pipe, a device, or a symbolic link that points outside the directory.
        ModelLoadError: the manifest is damaged.
    """
    manifest = find_manifest(directory)
    files = _read(directory / manifest) if manifest is not None else _DEFAULTS
    if "optimizer_model" not in files:
        raise CheckpointError(
            f"Opening the training run in '{directory}': it has no optimizer model. Generate the artifacts with "
            f"{argument('optimizer', 'adamw')}."
        )
    if not (directory / files["checkpoint"]).is_file():
        # ModelCheckpoint saves to subdirectories of the path that users pass.
        inside = sorted(path.parent for path in directory.glob(f"*/{files['checkpoint']}"))
        missing = (
            f"there is no file '{files['checkpoint']}'"
            if not directory.is_file()
            else "it is a file, not a directory"
        )
        example = f", such as '{inside[-1]}'" if inside else ""
        raise CheckpointError(
            f"Opening the training run in '{directory}': {missing}. {words().open_run()}{example}."
        )
    for name in (*files.values(), *companions(directory)):
        own_file(directory, name)
    return Files(manifest=manifest or MANIFEST, **files)


def companions(directory: Path) -> list[str]:
    """Returns the names of a run's optional files in a directory: best parameters, averages, predictions."""
    if not directory.is_dir():
        return []
    return sorted(name for name in os.listdir(directory) if is_companion(name))


def is_companion(name: str) -> bool:
    """True if `name` is the name of an optional file of a run.

    >>> [is_companion(name) for name in ("best", "predictions-2-10.npz", "predictions-test.npz")]
    [True, True, False]
    """
    return name in (BEST, AVERAGE, SWA_AVERAGE) or is_predictions(name)


def is_predictions(name: str) -> bool:
    """True if `name` is the name of a file with an unfinished epoch's predictions, e.g. "predictions-2-10.npz"."""
    return _PREDICTIONS.fullmatch(name) is not None


def is_run_file(name: str, manifest: str = MANIFEST) -> bool:
    """True if a trainer writes files called `name` to a run's directory; `manifest` is the name of the manifest."""
    prefix = manifest.removesuffix(MANIFEST)
    data = re.fullmatch(r"(.+)\.[0-9a-f]{12}\.data", name)
    written = {f"{prefix}{default}" for default in (MANIFEST, *_DEFAULTS.values())}
    return (data[1] if data else name) in written or is_companion(name)


def holds_run(directory: Path, manifest: str = MANIFEST) -> bool:
    """True if a directory contains a run's manifest. If so, files with the names of run files belong to that run."""
    return is_manifest(directory / manifest)


def require_free(
    directory: Path, doing: str, names: Collection[str] = (), remedy: str = "", manifest: str = MANIFEST
) -> None:
    """Raises CheckpointError if a run in a directory would overwrite the user's files.

    Args:
        directory: directory of the run; may be missing.
        doing: beginning of the error message, e.g. "Saving the run to 'runs/1'".
        names: names of further files that the caller will write to the directory.
        remedy: text to append to "Choose another directory" in the message.
        manifest: name of the run's manifest.
    """
    if not directory.is_dir() or holds_run(directory, manifest):
        return
    taken = sorted(name for name in os.listdir(directory) if is_run_file(name, manifest) or name in names)
    if taken:
        listed = ", ".join(f"'{name}'" for name in taken[:10]) + (", ..." if len(taken) > 10 else "")
        raise CheckpointError(
            f"{doing}: the directory contains {listed}, and no {manifest} shows that a training run wrote "
            f"{'it' if len(taken) == 1 else 'them'}. Choose another directory{remedy}."
        )


def _read(path: Path) -> dict[str, str]:
    """Reads the names of a run's files from its manifest, by role, e.g. {"checkpoint": "checkpoint"}."""
    try:
        files = parse_json(path.read_bytes())["files"]
        named = {role: files[role] for role in _DEFAULTS if files.get(role) is not None}
        # A name with directories could make a run read or replace files outside of its directory.
        wrong = [name for name in named.values() if name in (".", "..") or Path(name).name != name]
        # Linux, macOS and Windows allow names of 255 bytes. `fsencode` raises ValueError for text that cannot be
        # encoded.
        wrong += [name for name in named.values() if len(os.fsencode(name)) > 255]
        if wrong or not _DEFAULTS.keys() - _OPTIONAL <= named.keys():
            raise ValueError(f"files {files}")
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelLoadError(
            f"Opening the training run in '{path.parent}': its manifest '{path.name}' is corrupt "
            f"({type(error).__name__}: {error}). Generate the artifacts again."
        ) from error
    return named


def refuse_model_name(path: str | os.PathLike[str], function: str, written: str) -> None:
    """Raises InputError if the path for a function that does not write a model ends with `.onnx`.

    Args:
        path: path that the user passed.
        function: name of the function, e.g. "Trainer.save".
        written: description of what the function writes, e.g. "a checkpoint".
    """
    name = os.fspath(path)
    if name.lower().endswith(".onnx"):
        raise InputError(
            f"{function}('{name}') writes {written}, not a model. Trainer.export('{name}') writes the trained model; "
            f"for {function} choose a name without '.onnx'."
        )
