"""Describes a run for `onnxtrain inspect`: its model, data and settings, its best epoch, its files, and next steps."""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxtrain._settings import settings_text
from onnxtrain.cli._config import RUN_FILE
from onnxtrain.cli._output import Content, heading, summary_table, table
from onnxtrain.cli._prediction_file import prediction_file
from onnxtrain.cli._remember import PROPERTY as OPTIONS
from onnxtrain.errors import CheckpointError
from onnxtrain.runtime.artifact_folder import own_file
from onnxtrain.runtime.json_text import parse_json
from onnxtrain.runtime.manifest import Manifest
from onnxtrain.runtime.store import Store
from onnxtrain.selection import some_names
from onnxtrain.tables import PROPERTY as TABLE
from onnxtrain.tables import TableEncoder
from onnxtrain.texts._settings import PROPERTY as TEXTS
from onnxtrain.trainer._metrics.metrics import METRICS
from onnxtrain.trainer._run.history import History, best_index
from onnxtrain.trainer._run.position import PROPERTY, Plan, Position
from onnxtrain.trainer._run.rates import learning_rate_scales

# Purposes of the files of a run that people use. Other files are listed without a purpose.
_PURPOSES = {
    "trained.onnx": "trained model, for any ONNX Runtime",
    "checkpoint": "parameters and training state, to resume from",
    RUN_FILE: "options of the run, for --config",
    "checkpoints": "checkpoints of --save-every",
    "best": "parameters of the best epoch",
    "swa": "averages of --swa-start",
    "inference_model.onnx": "model without loss, filled from the checkpoint",
    "manifest.json": "inputs and outputs of the models",
}


def describe_run(path: Path, manifest: Manifest, store: Store) -> dict[str, Any]:
    """Returns a description of the run in a directory: the "run" entry of the JSON that `inspect --json` prints.

    Args:
        path: directory of the run.
        manifest: manifest of the run.
        store: content of its checkpoint.

    Raises:
        CheckpointError: the record of the run is damaged.
    """
    position, settings, _ = Position.from_json(str(store.properties[PROPERTY]), f"'{path}'")
    options, files = _options(store), _run_file(path)
    encoder = None
    if TABLE in store.properties:
        encoder = TableEncoder.from_json(str(store.properties[TABLE]), str(path))
    history = position.history
    # Only epochs of the last fit, because --patience and --save-best choose among these.
    epochs = history.epochs[position.fit_start :]
    monitor = best_key(options.get("monitor"), epochs)
    best = _best_epoch(epochs, monitor, options.get("min_delta"))
    return {
        "model": files.get("model"),
        "data": files.get("data"),
        "loss": settings.loss,
        "optimizer": None if manifest.optimizer is None else manifest.optimizer.type,
        "optimizer_settings": {} if manifest.optimizer is None else manifest.optimizer.settings,
        "learning_rate": position.learning_rate,
        "learning_rate_scales": learning_rate_scales(manifest),
        "schedule": settings.scheduler,
        "samples": None if position.plan is None else position.plan.samples,
        "batch_size": None if position.plan is None else position.plan.batch_size,
        "validation": None if position.plan is None else position.plan.validation,
        "target": None if encoder is None else encoder.target,
        "classes": None if encoder is None else encoder.classes_,
        "columns": None if encoder is None else {c.name: c.description for c in encoder.columns_},
        "progress": _progress(position.plan, position, history),
        "steps": position.step,
        "monitor": monitor,
        "best_epoch": None if best is None else position.fit_start + best + 1,
        "best": None if best is None else epochs[best],
        "last_epoch": position.epoch,
        "last": epochs[-1] if epochs else None,
        "files": {entry.name: _size(entry) for entry in sorted(path.iterdir())} if path.is_dir() else {},
        "next": _commands(
            path,
            None if "files" in _record(store) else files.get("data", "FILE"),
            unfinished=position.unfinished,
            has_options=(path / RUN_FILE).is_file(),
            predictions="embeddings.npy" if TEXTS in store.properties else prediction_file(manifest.targets),
        ),
    }


def _options(store: Store) -> dict[str, Any]:
    """Returns the options with which the run was started; an empty dict for a run started in Python."""
    options = _record(store).get("options")
    return options if isinstance(options, dict) else {}


def _record(store: Store) -> dict[str, Any]:
    """Returns what `onnxtrain train` stored in the run; an empty dict for a run started in Python."""
    try:
        record = parse_json(str(store.properties[OPTIONS])) if OPTIONS in store.properties else {}
    except ValueError:
        # `onnxtrain train` reports the damage; `inspect` shows the rest.
        return {}
    return record if isinstance(record, dict) else {}


def _run_file(path: Path) -> dict[str, Any]:
    """Returns the content of the run's options file; an empty dict if the file is missing or unreadable."""
    try:
        return tomllib.loads(own_file(path, RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, CheckpointError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        # Users may edit the file, and nothing in the run depends on it.
        return {}


def best_key(monitor: object, epochs: Sequence[Mapping[str, float]]) -> str | None:
    """Returns the key whose values determine the best epoch.

    It is the first of `monitor`, "val_loss" and "loss" that every epoch has recorded. Returns None if there are no
    epochs, or if each of these keys is missing in some epoch.

    >>> best_key(None, [{"epoch": 1, "loss": 0.5, "val_loss": 0.6}])
    'val_loss'
    """
    keys = [key for key in (monitor, "val_loss", "loss") if isinstance(key, str)]
    return next((key for key in keys if epochs and all(key in epoch for epoch in epochs)), None)


def _best_epoch(epochs: Sequence[dict[str, float]], key: str | None, min_delta: object) -> int | None:
    """Returns the index of the epoch with the best value of `key`; None if `key` is None.

    Args:
        epochs: recorded values of each epoch.
        key: key of the values to compare, e.g. "val_loss".
        min_delta: value of `--min-delta`; smaller improvements do not count.
    """
    if key is None:
        return None
    metric = METRICS.get(key.removeprefix("val_"))
    rises = metric is not None and bool(metric.higher_is_better)
    # As for --save-best, so that this is the epoch whose weights were exported.
    delta = min_delta if isinstance(min_delta, float) else 0.0
    return best_index([epoch[key] for epoch in epochs], rises=rises, min_delta=delta)


def _progress(plan: Plan | None, position: Position, history: History) -> str:
    if plan is None:
        return "not trained yet"
    # Epochs are counted over all fits of the run, as in the log of training.
    end = position.fit_start + plan.epochs
    if position.unfinished:
        batches = f" and {position.batch} batches" if position.batch else ""
        return f"interrupted after {position.epoch} of {end} epochs{batches}"
    early = f", of {end}: stopped early" if history.stopped == "early" else ""
    return f"finished, {position.epoch} epochs{early}"


def _size(entry: Path) -> int:
    """Returns the size in bytes of a file, or of all files in a directory. Symbolic links count as 0 bytes."""
    if entry.is_symlink():
        return 0
    # Not with `rglob`, which follows links to directories in some versions of Python.
    paths = (Path(folder, name) for folder, _, names in os.walk(entry) for name in names)
    return sum(
        path.lstat().st_size for path in (paths if entry.is_dir() else [entry]) if not path.is_symlink()
    )


def _commands(
    path: Path, data: object, *, unfinished: bool, has_options: bool, predictions: str
) -> dict[str, str]:
    """Returns commands for the next steps, by what they do.

    Args:
        path: directory of the run.
        data: path of the training data, "FILE" if it is unknown, or None if the run remembers it.
        unfinished: True if a fit was interrupted.
        has_options: True if the run has an options file.
        predictions: file that `predict` writes, e.g. "predictions.csv".
    """
    run = shlex.quote(str(path))
    passed = "" if data is None else f" --data {shlex.quote(data) if isinstance(data, str) else 'FILE'}"
    resume = "finish the interrupted training" if unfinished else "train further"
    commands = {
        resume: f"onnxtrain train {run}{passed}",
        "measure on other data": f"onnxtrain evaluate {run} --data FILE",
        "predict": f"onnxtrain predict {run} --data FILE -o {predictions}",
        "write the model": f"onnxtrain export {run} -o model.onnx",
    }
    # Runs started in Python have no options file.
    if has_options:
        commands["repeat the run"] = f"onnxtrain train --config {shlex.quote(str(path / RUN_FILE))} -o DIR"
    return commands


def run_tables(path: Path, run: Mapping[str, Any], trained: str) -> list[Content]:
    """Formats the description of a run as tables, up to the heading of the commands for next steps.

    Args:
        path: directory of the run.
        run: result of :func:`describe_run`.
        trained: number of trained scalar parameters out of all scalar parameters, e.g. "67 of 67".
    """
    schedule = f", {run['schedule']}" if run["schedule"] else ""
    rows: list[tuple[str, object]] = [
        ("model", run["model"]),
        ("trained parameters", trained),
        ("loss", run["loss"]),
        ("optimizer", f"{run['optimizer']}, learning rate {run['learning_rate']:g}{schedule}"),
        ("optimizer settings", _settings_text(run["optimizer_settings"])),
        ("data", run["data"]),
        ("samples", _samples(run)),
        ("target", ", ".join(run["target"] or []) or None),
        ("classes", ", ".join(run["classes"] or []) or None),
        ("progress", run["progress"]),
        ("steps", f"{run['steps']:,}"),
    ]
    shown: list[Content] = [
        heading(f"Run {path}"),
        summary_table(None, [(name, value) for name, value in rows if value is not None]),
    ]
    if len(set(run["learning_rate_scales"].values())) > 1:
        shown.append(_rate_table(run["learning_rate"], run["learning_rate_scales"]))
    if run["columns"]:
        shown.append(table("Columns", ("column", "encoding"), list(run["columns"].items())))
    best, last = run["best"], run["last"]
    if best is not None and last is not None:
        columns = (
            "",
            f"best epoch: {run['best_epoch']}, by {run['monitor']}",
            f"last epoch: {run['last_epoch']}",
        )
        values = [
            (key, f"{best[key]:.5g}", f"{last[key]:.5g}") for key in best if key != "epoch" and key in last
        ]
        shown.append(table("Recorded values", columns, values, right=(1, 2)))
    files = [(name, f"{size:,}", _PURPOSES.get(name, "")) for name, size in run["files"].items()]
    shown.append(table("Files", ("file", "bytes", ""), files, right=(1,)))
    return [*shown, heading("Next")]


def _settings_text(settings: Mapping[str, Any]) -> str | None:
    """Returns an optimizer's settings as text, without groups that only have learning rates; None for no settings."""
    groups = settings.get("groups")
    rates_only = isinstance(groups, list) and all(
        isinstance(group, dict) and group.keys() <= {"type", "parameters", "learning_rate_scale"}
        for group in groups
    )
    shown = {name: value for name, value in settings.items() if not (name == "groups" and rates_only)}
    return settings_text(shown) or None


def _rate_table(rate: float, scales: Mapping[str, float]) -> Content:
    """Formats the learning rates of groups of parameters as a table, lowest rate first."""
    rows = []
    for scale in sorted(set(scales.values())):
        names = [name for name, own in scales.items() if own == scale]
        rows.append((f"{rate * scale:.3g}", f"{scale:.4g}", f"{len(names):,}", some_names(names, 4)))
    columns = ("learning rate", "factor", "parameters", "names")
    return table("Learning rates, before the schedule", columns, rows, right=(0, 1, 2))


def _samples(run: Mapping[str, Any]) -> str | None:
    if run["samples"] is None:
        return None
    validation = run["validation"]
    held_out = ""
    if validation is not None:
        # A float is the fraction that was split off, an int the number of samples in another file.
        held_out = (
            f", and {validation:.3g} of all"
            if isinstance(validation, float)
            else f", and {validation:,} others"
        )
        held_out += " to validate with"
    return f"{run['samples']:,}{held_out}, in batches of {run['batch_size']}"
