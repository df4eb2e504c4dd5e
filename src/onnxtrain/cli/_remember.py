"""Remembers the options of a run in its checkpoint, and refuses others when the run goes on.

The run may come from a stranger. So the paths that it remembers are used only if they lie inside its own directory; of
files to read also if they lie beside the data that the user has named.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from onnxtrain.cli._config import names_file
from onnxtrain.cli._declared import build, flag, flat, off_flag, options_of
from onnxtrain.cli._settings import number_or_text
from onnxtrain.cli._train_options import TrainOptions
from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.runtime.atomic import is_stream
from onnxtrain.runtime.json_text import parse_json
from onnxtrain.tables import PROPERTY as ENCODER
from onnxtrain.tables import TableEncoder
from onnxtrain.trainer import Trainer
from onnxtrain.trainer._checks import check_types

PROPERTY = "onnxtrain.cli"
"""Name of the checkpoint property that holds the options, as JSON text."""

# Options that a run remembers, by name, and the types of their values.
_OPTIONS = {name: option for name, option in options_of(TrainOptions).items() if option.rule.kept}
_TYPES = {name: get_args(option.annotation)[0] for name, option in _OPTIONS.items()}

# Options whose values are, or may be, paths. They are kept as texts: relative to the directory of the run if they lie
# inside it, and else absolute, to be named in a message.
_PATHS = [
    name for name, option in _OPTIONS.items() if names_file(option.annotation.__metadata__[0].metavar or "")
]

# A run that asks for more epochs does not end: someone has to want it.
_MOST_EPOCHS = 10**6


class _Saved(NamedTuple):
    """Options of a run that goes on, as its checkpoint has them.

    Attributes:
        options: values of options by name; fewer for a run begun in Python.
        outside: options whose paths lie outside the directory of the run, with the text of the path.
        data: fingerprint of the data; None if it is not known.
    """

    options: dict[str, Any]
    outside: dict[str, str]
    data: str | None


def digest(arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Hashes named arrays: names, dtypes, shapes and values."""
    content = hashlib.sha256()
    for name in sorted(arrays):
        # The hash reads memory, and a slice or a transposed array has gaps or another order there.
        array = np.ascontiguousarray(arrays[name])
        # Names, dtypes and shapes belong to the hash: the same bytes can be other arrays.
        content.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        content.update(array.reshape(-1).view(np.uint8).data)
    return content.hexdigest()


def remember(trainer: Trainer, options: TrainOptions, data: str) -> None:
    """Stores the options in the trainer's properties; `data` is the fingerprint of the training data."""
    values = {name: value for name, value in flat(options).items() if name in _OPTIONS}
    for name in _PATHS:
        path = _path(values[name])
        if path is not None:
            inside = _inside(trainer.directory, path.absolute())
            base = trainer.directory.resolve()
            values[name] = str(path.absolute()) if inside is None else inside.relative_to(base).as_posix()
    trainer.state.properties[PROPERTY] = json.dumps({"version": 1, "options": values, "data": data})


def recall(trainer: Trainer, options: TrainOptions, given: Collection[str], data: str) -> TrainOptions:
    """Merges the options of this command with those of the run; options that were given win.

    Args:
        trainer: the resumed run.
        options: options of this command.
        given: names of the options that were given on the command line.
        data: fingerprint of the arrays to train on.

    Raises:
        InputError: a given option differs from the run's and may not be changed, or the run was started with paths
            outside its directory that this command does not give.
        CheckpointError: the record in the checkpoint is damaged.
    """
    # A run saves to its own directory: another --output would be ignored.
    if options.output is not None and options.output.resolve() != options.source.resolve():
        raise InputError(
            f"--output is '{options.output}', but a run goes on in its own directory. Copy '{options.source}' and "
            "train the copy."
        )
    saved, outside, saved_data = _saved(trainer, options)
    values = flat(options)
    if missing := [name for name in outside if name not in given]:
        before = " and ".join(f"{flag(name)} '{outside[name]}'" for name in missing)
        raise InputError(
            f"The run in '{options.source}' was started with {before}, outside its directory, where a run reads and "
            f"writes only what a command names. Give {' and '.join(map(flag, missing))} again; a path inside the "
            "directory is remembered."
        )
    if "epochs" not in given and saved.get("epochs", 1) > _MOST_EPOCHS:
        raise InputError(
            f"The run in '{options.source}' asks for {saved['epochs']} epochs. Say how many to train: --epochs COUNT."
        )
    # Other options of an interrupted fit would not give the result of the fit that did not stop.
    fixed = ("run", "fit") if trainer.resumes_fit else ("run",)
    contradictions = [
        _contradiction(name, values[name], saved[name])
        for name, option in _OPTIONS.items()
        if option.rule.kept in fixed
        and name in given
        and name in saved
        and not _same(values[name], outside.get(name, saved[name]), named_again=name in outside)
    ]
    if contradictions:
        state = "has been interrupted and" if trainer.resumes_fit else "has"
        raise InputError(
            f"The run in '{options.source}' {state} been started with other options than {', '.join(contradictions)}. "
            "Leave them out to go on with it, or start a new run with --output DIR."
        )
    unknown = [
        flag(name)
        for name, option in _OPTIONS.items()
        if option.rule.kept == "run" and name in given and name not in saved
    ]
    if unknown:
        raise InputError(
            f"The run in '{options.source}' was not started from the command line, so {', '.join(unknown)} cannot be "
            "compared with what it was started with. Leave out what is not to change."
        )
    # A finished run may go on with other data, which is how a model is trained further.
    if trainer.resumes_fit and saved_data not in (None, data):
        raise InputError(
            f"The run in '{options.source}' was interrupted while training on other data than '{options.data}' holds. "
            "Give the same data to go on with it."
        )
    return build(TrainOptions, values | {name: value for name, value in saved.items() if name not in given})


def paths_outside(options: TrainOptions, directory: Path) -> str:
    """Returns the options with paths that a run in `directory` does not remember, e.g. " --log log.csv"."""
    values = flat(options)
    paths = {name: path for name in _PATHS if (path := _path(values[name])) is not None}
    return "".join(
        f" {flag(name)} {shlex.quote(str(path))}"
        for name, path in paths.items()
        if _inside(directory, path.absolute()) is None
        and (name != "validation" or _validation_file(directory, options.data, path) is None)
    )


def _path(value: object) -> Path | None:
    """Returns the value of an option as a path; None if it is not one, such as the fraction of `--validation`."""
    is_path = isinstance(value, Path) or (isinstance(value, str) and isinstance(number_or_text(value), str))
    return Path(str(value)) if is_path else None


def _inside(directory: Path, path: Path) -> Path | None:
    """Resolves a path, relative to a directory or absolute, if it lies in the directory.

    Returns:
        The path; None if it leads outside, through a link too, or to a pipe or a device.

    Raises:
        ValueError: no file can have this name.
    """
    # Linux, macOS and Windows allow names of 255 bytes.
    if any(len(os.fsencode(part)) > 255 for part in path.parts):
        raise ValueError(f"path {str(path)[:60]!r}...")
    try:
        resolved, base = (directory / path).resolve(), directory.resolve()
    except (OSError, RuntimeError) as error:
        raise ValueError(f"path {str(path)[:60]!r}: {error}") from error
    if resolved == base or not resolved.is_relative_to(base) or is_stream(resolved):
        return None
    return resolved


def _validation_file(directory: Path, data: Path, path: Path) -> Path | None:
    """Resolves the path of a remembered file of validation data.

    Returns:
        The file; None unless it lies in the directory of the run, or beside the data that the user has named.
    """
    inside = _inside(directory, path)
    beside = _inside(data.absolute().parent, path.absolute())
    if beside is not None and beside.parent != data.resolve().parent:
        beside = None
    return next((found for found in (inside, beside) if found is not None and found.is_file()), None)


def _same(value: object, before: object, *, named_again: bool) -> bool:
    """True if an option has the value that the run was started with; a file that is `named_again` may have moved."""
    path, path_before = _path(value), _path(before)
    if path is None or path_before is None:
        return value == before
    return named_again or path.resolve() == path_before.resolve()


def _saved(trainer: Trainer, options: TrainOptions) -> _Saved:
    """Returns the options in the checkpoint of a run."""
    properties = trainer.state.properties
    text = properties[PROPERTY] if PROPERTY in properties else None  # noqa: SIM401 not a dict
    fit = trainer.last_fit
    saved: dict[str, Any] = {}
    outside: dict[str, str] = {}
    data = None
    if text is not None:
        try:
            record = parse_json(str(text))
            # A later version may give an option another meaning: better an error than another training.
            if record["version"] != 1:
                raise ValueError(f"version {record['version']}")
            saved, data = dict(record["options"]), str(record["data"])
            if other := saved.keys() ^ _OPTIONS.keys():
                raise ValueError(f"options {', '.join(sorted(other))}")
            for name, value in saved.items():
                check_types(value, str | None if name in _PATHS else _TYPES[name], name)
            for name in _PATHS:
                path = _path(saved[name])
                if path is None:
                    continue
                if name == "validation":
                    found = _validation_file(trainer.directory, options.data, path)
                    saved[name] = None if found is None else str(found)
                else:
                    saved[name] = _inside(trainer.directory, path)
                if saved[name] is None:
                    outside[name] = str(path)
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise CheckpointError(
                f"Resuming from '{options.source}': its property '{PROPERTY}' is not a record of options ({error}). It "
                "may have been written by another version of onnxtrain."
            ) from error
    elif fit is not None:
        # A run that Python began tells its fit alone; what is not known cannot be contradicted.
        saved = {"epochs": fit.epochs, "accumulate": fit.accumulate, "patience": None}
        saved |= {
            "no_shuffle": not fit.shuffle,
            "drop_last": fit.drop_last,
            "steps_per_epoch": fit.steps_per_epoch,
        }
        if not isinstance(fit.validation, int):
            saved["validation"] = None if fit.validation is None else str(fit.validation)
    if fit is not None and trainer.resumes_fit:
        # Recorded as the fit used it: a model with a fixed batch chooses the size itself.
        saved["batch_size"] = fit.batch_size
    # The rate of the trainer, not of the record: ReduceLROnPlateau or Python may have changed it.
    saved["learning_rate"] = trainer.learning_rate
    return _Saved(saved, outside, data)


def saved_encoder(trainer: Trainer, source: Path) -> TableEncoder | None:
    """Returns the encoder of the table that a run was trained on; None for a run on arrays."""
    properties = trainer.state.properties
    return TableEncoder.from_json(str(properties[ENCODER]), str(source)) if ENCODER in properties else None


def _contradiction(name: str, value: object, before: object) -> str:
    """Returns an option and its value before: "--lr 0.1 (it was 0.01)", "--no-scale (it was on)"."""
    if isinstance(value, bool):
        return f"{flag(name)} (it was off)" if value else f"{off_flag(name)} (it was on)"
    return f"{flag(name)} {_show(value)} (it was {_show(before)})"


def _show(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "not given" if value is None else str(value)
