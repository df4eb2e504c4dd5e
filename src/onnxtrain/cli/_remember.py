"""What a run was started with, kept in its checkpoint: it goes on with that, and with nothing that contradicts it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.cli._options import TrainOptions
from onnxtrain.cli._tables import PROPERTY as ENCODING
from onnxtrain.cli._tables import Encoding
from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.runtime.json_text import parse_json
from onnxtrain.trainer import Trainer

PROPERTY = "onnxtrain.cli"
"""Name of the checkpoint property that holds the options, as JSON text."""

_OF_THE_RUN = (
    "loss",
    "optimizer",
    "weight_decay",
    "optimizer_option",
    "schedule",
    "schedule_option",
    "warmup",
    "warmup_ratio",
    "metric",
    "positive",
    "ema_decay",
    "clip_norm",
    "train",
    "freeze",
    "batch_norm",
    "precision",
    "dynamic_batch",
    "seed",
    "replace_head",
    "target",
    "inputs",
    "impute",
    "one_hot",
    "ordinal",
    "scale",
    "missing",
    "categorical",
    "id",
)
_BESIDE = ("log", "save_every", "keep")
"""What is written besides; it can always be given anew."""
_OF_A_FIT = (
    "learning_rate",
    "epochs",
    "batch_size",
    "accumulate",
    "patience",
    "validation",
    "schedule_epochs",
)
_ADDED: dict[str, Any] = {
    "precision": "fp32",
    "schedule_option": None,
    "schedule_epochs": None,
    "warmup_ratio": 0.0,
    "metric": None,
    "ema_decay": None,
    "replace_head": None,
    "target": None,
    "inputs": None,
    "impute": None,
    "one_hot": False,
    "ordinal": False,
    "scale": False,
    "weight_decay": None,
    "optimizer_option": None,
    "positive": None,
    "missing": None,
    "categorical": None,
    "id": None,
    "log": None,
    "save_every": None,
    "keep": None,
}
"""Options that records of earlier versions do not have, and what their runs were started with."""


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
    values = {name: getattr(options, name) for name in (*_OF_THE_RUN, *_OF_A_FIT, *_BESIDE)}
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
    fixed = (*_OF_THE_RUN, *_OF_A_FIT) if trainer.resumes_fit else _OF_THE_RUN
    contradictions = [
        f"{_flag(name)} {_show(getattr(options, name))} (it was {_show(saved[name])})"
        for name in fixed
        if name in given and name in saved and getattr(options, name) != saved[name]
    ]
    if contradictions:
        state = "has been interrupted and" if trainer.resumes_fit else "has"
        raise InputError(
            f"The run in '{options.source}' {state} been started with other options than {', '.join(contradictions)}. "
            "Leave them out to go on with it, or start a new run with --output DIR."
        )
    unknown = [_flag(name) for name in _OF_THE_RUN if name in given and name not in saved]
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
    return dataclasses.replace(options, **{k: v for k, v in saved.items() if k not in given})


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
            saved, data = _ADDED | dict(record["options"]), str(record["data"])
            saved["log"] = saved["log"] and Path(saved["log"])
            if isinstance(saved.get("batch_norm"), str):  # as one mode was written before there were several
                saved["batch_norm"] = [saved["batch_norm"]]
            if saved.keys() != {*_OF_THE_RUN, *_OF_A_FIT, *_BESIDE}:
                raise ValueError(f"options {', '.join(saved)}")
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


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _show(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "not given" if value is None else str(value)
