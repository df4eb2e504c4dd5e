"""Remembers the options of a run in its checkpoint, and refuses others when the run goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.cli._declared import build, flag, flat, off_flag, options_of
from onnxtrain.cli._tables import PROPERTY as ENCODING
from onnxtrain.cli._tables import Encoding
from onnxtrain.cli._train_options import TrainOptions
from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.runtime.json_text import parse_json
from onnxtrain.trainer import Trainer

PROPERTY = "onnxtrain.cli"
"""Name of the checkpoint property that holds the options, as JSON text."""

# Options whose values are paths; they are kept as texts, relative to nothing.
_PATHS = ("log", "tensorboard")

# Options that a run remembers, by name.
_OPTIONS = {name: option for name, option in options_of(TrainOptions).items() if option.rule.kept}


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
    # The command that goes on may be given in another directory, and is to write to the same files.
    for name in _PATHS:
        values[name] = None if values[name] is None else str(values[name].resolve())
    trainer.state.properties[PROPERTY] = json.dumps({"version": 1, "options": values, "data": data})


def recall(trainer: Trainer, options: TrainOptions, given: Collection[str], data: str) -> TrainOptions:
    """Merges the options of this command with those of the run; options that were given win.

    Args:
        trainer: the resumed run.
        options: options of this command.
        given: names of the options that were given on the command line.
        data: fingerprint of the arrays to train on.

    Raises:
        InputError: a given option differs from the run's and may not be changed.
        CheckpointError: the record in the checkpoint is damaged.
    """
    # A run saves to its own directory: another --output would be ignored.
    if options.output is not None and options.output.resolve() != options.source.resolve():
        raise InputError(
            f"--output is '{options.output}', but a run goes on in its own directory. Copy '{options.source}' and "
            "train the copy."
        )
    saved, saved_data = _saved(trainer, options)
    values = flat(options)
    # Other options of an interrupted fit would not give the result of the fit that did not stop.
    fixed = ("run", "fit") if trainer.resumes_fit else ("run",)
    contradictions = [
        _contradiction(name, values[name], saved[name])
        for name, option in _OPTIONS.items()
        if option.rule.kept in fixed and name in given and name in saved and values[name] != saved[name]
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


def _saved(trainer: Trainer, options: TrainOptions) -> tuple[dict[str, Any], str | None]:
    """Reads the options of the run and the fingerprint of its data; fewer options for a run begun in Python."""
    properties = trainer.state.properties
    text = properties[PROPERTY] if PROPERTY in properties else None  # noqa: SIM401 it is no dict
    fit = trainer.last_fit
    saved: dict[str, Any] = {}
    data = None
    if text is not None:
        try:
            record = parse_json(str(text))
            # A later version may give an option another meaning: better an error than another training.
            if record["version"] != 1:
                raise ValueError(f"version {record['version']}")
            # Runs of earlier versions were started with what is now the default of an option that they lack.
            defaults = {name: option.default for name, option in _OPTIONS.items()}
            saved, data = defaults | dict(record["options"]), str(record["data"])
            for name in _PATHS:
                saved[name] = saved[name] and Path(saved[name])
            # One value was written without a list before the options took several.
            for name in ("batch_norm", "impute"):
                if isinstance(saved[name], str):
                    saved[name] = [saved[name]]
            if unknown := saved.keys() - _OPTIONS.keys():
                raise ValueError(f"options {', '.join(sorted(unknown))}")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"Resuming from '{options.source}': its property '{PROPERTY}' is no record of options ({error}). It "
                "may have been written by a newer onnxtrain; upgrade."
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
    return saved, data


def saved_encoding(trainer: Trainer, source: Path) -> Encoding | None:
    """Reads the encoding of the table that a run was trained on; None for a run on arrays."""
    properties = trainer.state.properties
    return Encoding.from_json(str(properties[ENCODING]), str(source)) if ENCODING in properties else None


def _contradiction(name: str, value: object, before: object) -> str:
    """Names an option as it was given, and its value before: "--lr 0.1 (it was 0.01)", "--no-scale (it was on)"."""
    if isinstance(value, bool):
        return f"{flag(name)} (it was off)" if value else f"{off_flag(name)} (it was on)"
    return f"{flag(name)} {_show(value)} (it was {_show(before)})"


def _show(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "not given" if value is None else str(value)
