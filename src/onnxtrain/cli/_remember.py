"""Stores the options of a run in its checkpoint, and checks the options of a command that resumes the run.

A run may come from an untrusted source. So a stored path is used only if it is inside the run's directory or, for
validation data, in the directory of the training data. The training data itself may be anywhere, but its content must
be that on which the run was trained; see :func:`data_file`.
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
from onnxtrain.cli._options import TextOptions
from onnxtrain.cli._settings import number_or_text
from onnxtrain.cli._train_options import TrainOptions
from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.runtime.atomic import is_stream
from onnxtrain.runtime.json_text import parse_json
from onnxtrain.tables import PROPERTY as ENCODER
from onnxtrain.tables import TableEncoder, table_suffix
from onnxtrain.trainer import Trainer
from onnxtrain.trainer._checks import check_types

PROPERTY = "onnxtrain.cli"
"""Name of the checkpoint property that contains the options as JSON text."""

BEGUN = json.dumps({"version": 1, "options": None})
"""Value of the property from the creation of the run until :func:`remember`, before any training."""

# Options that a run stores, by name, and the types of their values.
_OPTIONS = {name: option for name, option in options_of(TrainOptions).items() if option.rule.kept}
_TYPES = {name: get_args(option.annotation)[0] for name, option in _OPTIONS.items()}

# Options whose values are, or may be, paths. Paths are stored as strings: relative to the directory of the run if they
# are inside it, otherwise absolute, for an error message.
_PATHS = [
    name for name, option in _OPTIONS.items() if names_file(option.annotation.__metadata__[0].metavar or "")
]

# Files that the models of a run contain, so that a resumed run does not read them again.
_BUILT_IN = frozenset({"teacher"})

# A stored number of epochs above this limit must be confirmed with --epochs, because such a run hardly ends.
_MOST_EPOCHS = 10**6


class _Saved(NamedTuple):
    """Options of a resumed run, read from its checkpoint.

    Attributes:
        options: option values by name; incomplete if the run was started in Python.
        outside: stored paths that are not used, because they are outside the permitted directories, by option name.
        data: digest of the training data; None if it is unknown.
    """

    options: dict[str, Any]
    outside: dict[str, str]
    data: str | None


def digest(arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Returns a SHA-256 digest of the names, dtypes, shapes and values of arrays."""
    content = hashlib.sha256()
    for name in sorted(arrays):
        # Contiguous, because the hash reads memory: slices have gaps, and transposed arrays another order.
        array = np.ascontiguousarray(arrays[name])
        # Names, dtypes and shapes are hashed, too, because different arrays can have the same bytes.
        content.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        content.update(array.reshape(-1).view(np.uint8).data)
    return content.hexdigest()


def remember(trainer: Trainer, options: TrainOptions, data: str) -> None:
    """Stores the options of a run in the trainer's properties; `data` is the digest of the training data."""
    assert options.data is not None
    values = {name: value for name, value in flat(options).items() if name in _OPTIONS}
    for name in _PATHS:
        path = _path(values[name])
        if path is not None:
            inside = _inside(trainer.directory, path.absolute())
            base = trainer.directory.resolve()
            values[name] = str(path.absolute()) if inside is None else inside.relative_to(base).as_posix()
    record = {
        "version": 1,
        "options": values,
        "data": data,
        "files": _places(options.data, trainer.directory),
    }
    trainer.state.properties[PROPERTY] = json.dumps(record)


def _places(data: Path, directory: Path) -> list[str]:
    """Returns the paths under which a resumed run looks for its data: relative to its directory, then absolute.

    The first one is found if a folder with the run and the data was moved, the second one if only the run was.
    """
    path = data.absolute()
    try:
        return [Path(os.path.relpath(path.resolve(), directory.resolve())).as_posix(), str(path)]
    # Windows has no relative path to another drive.
    except ValueError:
        return [str(path)]


def data_file(trainer: Trainer, options: TrainOptions) -> Path:
    """Returns the file to train on: `--data`, or the file that a resumed run was trained on.

    The run may come from an untrusted source, and name any file. :func:`recall` therefore accepts a file that was not
    passed only if its content is what the run was trained on, which its author must then have known.

    Raises:
        InputError: `--data` is not given, and the file is missing or unknown.
    """
    if options.data is not None:
        return options.data
    properties = trainer.state.properties
    text = properties[PROPERTY] if PROPERTY in properties else None  # noqa: SIM401 not a dict
    where = f"The run in '{options.source}'"
    remedy = f"Pass the file with {flag('data')} FILE."
    try:
        places = [str(place) for place in parse_json(str(text)).get("files", [])] if text is not None else []
        found = next(
            filter(None, (_regular_file(trainer.directory.resolve() / place) for place in places)), None
        )
    except (AttributeError, TypeError, ValueError, OSError):
        places, found = [], None
    if found is not None:
        return found
    if places and Path(places[-1]).is_dir():
        # To compare its content, all of a folder would be read, which a received run may name at will.
        raise InputError(
            f"{where} was trained on the folder '{places[-1]}'. Pass it with {flag('data')} DIR."
        )
    if places:
        raise InputError(f"{where} was trained on '{places[-1]}', which is not there any more. {remedy}")
    raise InputError(f"{where} does not say on which file it was trained. {remedy}")


def _regular_file(path: Path) -> Path | None:
    """Returns a path if it is that of a regular file on this machine, else None."""
    # Opening a file on another machine would send the user's name and a hash of the password there.
    if path.drive.startswith("\\\\") or is_stream(path) or not path.is_file():
        return None
    # Shorter in messages, if it is below the working directory.
    path = path.resolve()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def require_options(trainer: Trainer, source: Path) -> None:
    """Raises CheckpointError if the command that created a run was killed before it stored its options.

    Args:
        trainer: the resumed run.
        source: directory of the run, for the message.
    """
    properties = trainer.state.properties
    # Python code may have trained the run since then.
    if PROPERTY in properties and properties[PROPERTY] == BEGUN and not trainer.global_step:
        raise CheckpointError(
            f"Resuming from '{source}': the command that created the run was killed before it began to train, and its "
            f"options are not stored. Repeat that command with {flag('overwrite')}."
        )


def recall(trainer: Trainer, options: TrainOptions, given: Collection[str], data: str) -> TrainOptions:
    """Returns the options of a command that resumes a run, with stored values for the options that were not given.

    Args:
        trainer: the resumed run.
        options: options of the command.
        given: names of the options that were given on the command line or in an options file.
        data: digest of the arrays to train on.

    Raises:
        InputError: an option that may not change was given with a different value, an interrupted fit is resumed with
            different data, or a path outside the run's directory has to be passed again.
        CheckpointError: the stored options are damaged.
    """
    assert options.source is not None
    # A run saves to its own directory, so a different --output would be ignored.
    if options.output is not None and options.output.resolve() != options.source.resolve():
        raise InputError(
            f"--output is '{options.output}', but a run is resumed in its own directory. Copy '{options.source}' and "
            "train the copy."
        )
    saved, outside, saved_data = _saved(trainer, options)
    values = flat(options)
    if missing := [name for name in outside if name not in given and name not in _BUILT_IN]:
        before = " and ".join(f"{flag(name)} '{outside[name]}'" for name in missing)
        raise InputError(
            f"The run in '{options.source}' was started with {before}, outside its directory. For safety, "
            "such paths are not reused unless they are passed again: pass "
            f"{' and '.join(map(flag, missing))}. Only paths inside the directory are remembered."
        )
    if "epochs" not in given and saved.get("epochs", 1) > _MOST_EPOCHS:
        raise InputError(
            f"The run in '{options.source}' asks for {saved['epochs']} epochs. Confirm the number with "
            "--epochs COUNT."
        )
    # With other options, an interrupted fit would not reproduce the result of an uninterrupted one.
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
        state = "was interrupted, and was" if trainer.resumes_fit else "was"
        raise InputError(
            f"The run in '{options.source}' {state} started with other options than {', '.join(contradictions)}. "
            "Leave them out to resume it, or start a new run with --output DIR."
        )
    unknown = [
        flag(name)
        for name, option in _OPTIONS.items()
        if option.rule.kept == "run" and name in given and name not in saved
    ]
    if unknown:
        raise InputError(
            f"The run in '{options.source}' was not started from the command line, so {', '.join(unknown)} "
            "cannot be compared with its original options. Leave out options that should not change."
        )
    if "data" not in given and saved_data != data:
        # The options hold the path that was found.
        remedy = "Restore the file" if trainer.resumes_fit else f"Pass {flag('data')} to train on it as it is"
        raise InputError(
            f"'{options.data}' has changed since the run in '{options.source}' was trained on it. {remedy}, or start "
            f"a new run with {flag('output')} DIR."
        )
    # A finished run may be trained further on other data.
    if trainer.resumes_fit and saved_data not in (None, data):
        raise InputError(
            f"The run in '{options.source}' was interrupted while training on data other than "
            f"'{options.data}'. Pass the same data to resume it."
        )
    return build(TrainOptions, values | {name: value for name, value in saved.items() if name not in given})


def recall_text(trainer: Trainer, options: TrainOptions) -> TextOptions:
    """Returns how to read the data of a resumed run: as given with this command, else as given when it was started."""
    # What was given for a text file does not concern a run that goes on with a .parquet file.
    if options.data is None or table_suffix(options.data) in (None, ".parquet"):
        return options.text
    saved = _saved(trainer, options).options
    values = vars(options.text).items()
    return TextOptions(**{name: saved.get(name) if value is None else value for name, value in values})


def paths_outside(options: TrainOptions, directory: Path) -> str:
    """Returns the path options that the user must pass again to resume a run, e.g. " --log log.csv".

    For safety, a resumed run does not reuse a stored path outside its directory. A validation file may also be in the
    directory of the training data.

    Args:
        options: options of the command.
        directory: directory of the run.
    """
    values = flat(options)
    data = options.data
    paths = {name: path for name in _PATHS if (path := _path(values[name])) is not None}
    return "".join(
        f" {flag(name)} {shlex.quote(str(path))}"
        for name, path in paths.items()
        if name not in _BUILT_IN
        and _inside(directory, path.absolute()) is None
        and (name != "validation" or data is None or _validation_file(directory, data, path) is None)
    )


def _path(value: object) -> Path | None:
    """Converts an option's value to a path; returns None if it is not a path, e.g. `--validation 0.1`."""
    is_path = isinstance(value, Path) or (isinstance(value, str) and isinstance(number_or_text(value), str))
    return Path(str(value)) if is_path else None


def _inside(directory: Path, path: Path) -> Path | None:
    """Resolves a path relative to a directory; returns None if it is outside that directory, or is a pipe or device.

    Symbolic links are followed.

    Raises:
        ValueError: the path is not a valid file name.
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
    """Returns the resolved path of a stored validation file; None if it is missing or may not be read.

    Args:
        directory: directory of the run, in which the file may be.
        data: path of the training data that the user passed. The file may also be in the same directory as the data.
        path: the stored path.
    """
    inside = _inside(directory, path)
    beside = _inside(data.absolute().parent, path.absolute())
    if beside is not None and beside.parent != data.resolve().parent:
        beside = None
    # A folder of images is a directory.
    found_ones = (found for found in (inside, beside) if found is not None)
    return next((found for found in found_ones if found.is_file() or found.is_dir()), None)


def _same(value: object, before: object, *, named_again: bool) -> bool:
    """True if an option has the same value as when the run was started.

    Args:
        value: value that was given.
        before: stored value.
        named_again: True if the stored value is a path that the user has to pass again, so that any path is accepted.
    """
    path, path_before = _path(value), _path(before)
    if path is None or path_before is None:
        return value == before
    return named_again or path.resolve() == path_before.resolve()


def _saved(trainer: Trainer, options: TrainOptions) -> _Saved:
    """Reads the options stored in the checkpoint of a run.

    Raises:
        CheckpointError: the stored options are damaged, or another version of onnxtrain wrote them.
    """
    properties = trainer.state.properties
    text = properties[PROPERTY] if PROPERTY in properties else None  # noqa: SIM401 not a dict
    fit = trainer.last_fit
    saved: dict[str, Any] = {}
    outside: dict[str, str] = {}
    data = None
    if text not in (None, BEGUN):
        try:
            record = parse_json(str(text))
            # In a later version an option may mean something else: an error is better than a different training run.
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
                if name == "validation" and options.data is not None:
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
        # A run started in Python stores only the arguments of its fit. Unknown options are not compared.
        saved = {"epochs": fit.epochs, "accumulate": fit.accumulate, "patience": None}
        saved |= {
            "no_shuffle": not fit.shuffle,
            "drop_last": fit.drop_last,
            "steps_per_epoch": fit.steps_per_epoch,
            "limit_batches": None if fit.limit_batches is None else str(fit.limit_batches),
        }
        if not isinstance(fit.validation, int):
            saved["validation"] = None if fit.validation is None else str(fit.validation)
    if fit is not None and trainer.resumes_fit:
        # The size that the fit used, which a model with a fixed batch size determines.
        saved["batch_size"] = fit.batch_size
    # The trainer's rate, not the stored one, because ReduceLROnPlateau or Python may have changed it.
    saved["learning_rate"] = trainer.learning_rate
    return _Saved(saved, outside, data)


def saved_encoder(trainer: Trainer, source: Path) -> TableEncoder | None:
    """Returns the run's table encoder; None for a run on arrays. `source` names the run in error messages."""
    properties = trainer.state.properties
    return TableEncoder.from_json(str(properties[ENCODER]), str(source)) if ENCODER in properties else None


def _contradiction(name: str, value: object, before: object) -> str:
    """Describes an option's new and old value, e.g. "--epochs 9 (it was 3)" or "--no-scale (it was on)"."""
    if isinstance(value, bool):
        return f"{flag(name)} (it was off)" if value else f"{off_flag(name)} (it was on)"
    return f"{flag(name)} {_show(value)} (it was {_show(before)})"


def _show(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "not given" if value is None else str(value)
