"""What a run was started with, kept in its checkpoint: it goes on with that, and with nothing that contradicts it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.cli._options import TrainOptions, build, flag, flat, options_of
from onnxtrain.cli._tables import PROPERTY as ENCODING
from onnxtrain.cli._tables import Encoding
from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.runtime.json_text import parse_json
from onnxtrain.trainer import Trainer

PROPERTY = "onnxtrain.cli"
"""Name of the checkpoint property that holds the options, as JSON text."""

_OPTIONS = {name: option for name, option in options_of(TrainOptions).items() if option.rule.kept}
"""Options that a run remembers, by name."""


def digest(arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Returns a fingerprint of named arrays: names, dtypes, shapes and values."""
    content = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        content.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        content.update(array.reshape(-1).view(np.uint8).data)
    return content.hexdigest()


def remember(trainer: Trainer, options: TrainOptions, data: str) -> None:
    """Puts the options into the trainer's properties; `data` is the fingerprint of what is trained on."""
    values = {name: value for name, value in flat(options).items() if name in _OPTIONS}
    # The command that goes on may be given in another directory, and is to write to the same file.
    values["log"] = None if options.log is None else str(options.log.resolve())
    trainer.state.properties[PROPERTY] = json.dumps({"version": 1, "options": values, "data": data})


def recall(trainer: Trainer, options: TrainOptions, given: Collection[str], data: str) -> TrainOptions:
    """Returns the options to go on with: those that were given, else those that the run was started with.

    Args:
        trainer: the resumed run.
        options: of this command.
        given: names of those that were given in it.
        data: fingerprint of the arrays to train on.

    Raises:
        InputError: a given option contradicts what the run was started with.
        CheckpointError: the record in the checkpoint is damaged.
    """
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
        f"{flag(name)} {_show(values[name])} (it was {_show(saved[name])})"
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
    if trainer.resumes_fit and saved_data not in (None, data):
        raise InputError(
            f"The run in '{options.source}' was interrupted while training on other data than '{options.data}' holds. "
            "Give the same data to go on with it."
        )
    return build(TrainOptions, values | {name: value for name, value in saved.items() if name not in given})


def _saved(trainer: Trainer, options: TrainOptions) -> tuple[dict[str, Any], str | None]:
    """Returns the options of the run, and the fingerprint of its data; of one that Python began what is known."""
    properties = trainer.state.properties
    text = properties[PROPERTY] if PROPERTY in properties else None  # noqa: SIM401 it is no dict
    fit = trainer.last_fit
    saved: dict[str, Any] = {}
    data = None
    if text is not None:
        try:
            record = parse_json(str(text))
            if record["version"] != 1:
                raise ValueError(f"version {record['version']}")
            # Runs of earlier versions were started with what is now the default of an option that they lack.
            defaults = {name: option.default for name, option in _OPTIONS.items()}
            saved, data = defaults | dict(record["options"]), str(record["data"])
            saved["log"] = saved["log"] and Path(saved["log"])
            # One mode was written without a list before `--batch-norm` took several.
            if isinstance(saved["batch_norm"], str):
                saved["batch_norm"] = [saved["batch_norm"]]
            if unknown := saved.keys() - _OPTIONS.keys():
                raise ValueError(f"options {', '.join(sorted(unknown))}")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"Resuming from '{options.source}': its property '{PROPERTY}' is no record of options ({error}). It "
                "may have been written by a newer onnxtrain; upgrade."
            ) from error
    elif fit is not None:
        saved = {"epochs": fit.epochs, "accumulate": fit.accumulate, "patience": None}
        if not isinstance(fit.validation, int):
            saved["validation"] = None if fit.validation is None else str(fit.validation)
    if fit is not None and trainer.resumes_fit:
        saved["batch_size"] = fit.batch_size
    saved["learning_rate"] = trainer.learning_rate
    return saved, data


def saved_encoding(trainer: Trainer, source: Path) -> Encoding | None:
    """Returns how tables become arrays in a run; None if it was not trained on one."""
    properties = trainer.state.properties
    return Encoding.from_json(str(properties[ENCODING]), str(source)) if ENCODING in properties else None


def _show(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "not given" if value is None else str(value)
