"""Prints the result of `onnxtrain train`: loss and metrics of the exported weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onnxtrain.cli._classes import metric_labels
from onnxtrain.cli._export import export_model
from onnxtrain.cli._output import heading, print_json, print_next, print_table, summary_table
from onnxtrain.cli._prediction_file import print_prediction_command
from onnxtrain.cli._texts import include_pooling, measured
from onnxtrain.cli._train_options import TrainOptions
from onnxtrain.errors import InputError
from onnxtrain.tables import Table, TableEncoder
from onnxtrain.texts import TextPairs
from onnxtrain.trainer import EarlyStopping, Trainer
from onnxtrain.trainer._fit.datasets import Data, fit_datasets, prediction_source
from onnxtrain.trainer._fit.verify import verify_export
from onnxtrain.trainer._run.history import best_index
from onnxtrain.trainer.data import Options, Pass, check_limit, limited

TRAINED = "trained.onnx"
"""Name of the trained model in the directory of a run."""


class Fitted(NamedTuple):
    """A trainer after a finished call to `fit`, and the data passed to that call.

    Attributes:
        trainer: the trainer.
        x, y, validation: data passed to `fit`.
        encoder: encoder of the table; None for a run on arrays.
        early: callback that restored the best epoch; None if the last epoch is exported.
        averaged: True if the exported weights are an average over epochs (SWA).
        classes: names of the classes; None for a numeric target.
        before: metrics of embeddings before training; None for a resumed run, and for data other than texts.
        table: the training table; None for other data.
    """

    trainer: Trainer
    x: Any
    y: Any
    validation: Any
    encoder: TableEncoder | None
    early: EarlyStopping | None
    averaged: bool = False
    classes: list[str] | None = None
    before: dict[str, float] | None = None
    table: Table | None = None


def chosen_limit(options: TrainOptions) -> int | float | None:
    """Parses the value of `--limit-batches`: a number of batches (int) or a fraction of them (float).

    Raises:
        InputError: it is neither, or `--steps-per-epoch` is given, too.
    """
    text = options.limit_batches
    if text is None:
        return None
    if options.steps_per_epoch is not None:
        raise InputError(
            "--steps-per-epoch and --limit-batches both set the length of an epoch; pass only one of them."
        )
    # The types differ in meaning: 1 is one batch, 1.0 would be all.
    try:
        return check_limit(int(text) if text.isdecimal() else float(text))
    except (ValueError, InputError):
        raise InputError(
            f"--limit-batches is '{text}'; give a number of batches such as 2, or a fraction such as 0.05."
        ) from None


def print_result(fitted: Fitted, options: TrainOptions, directory: Path) -> None:
    """Writes the trained model, and prints its loss and metrics.

    The training loss and metrics are computed again with the exported weights, because the values in the history are
    means over an epoch, during which the weights changed and Dropout was active.

    Args:
        fitted: trainer and data.
        options: options of the command.
        directory: directory of the run, as the user wrote it.
    """
    trainer, encoder = fitted.trainer, fitted.encoder
    model = None
    if trainer.outputs:
        model = directory / TRAINED
        export_model(trainer, encoder, model)
        if options.texts.include_pooling:
            include_pooling(trainer, model)
    differences = None
    if model is not None and (options.verify or options.limit_batches is not None):
        differences = _verified(fitted, model, options)
    # With --patience the exported weights are those of the best epoch.
    epoch = trainer.history.epochs[-1]["epoch"] if fitted.early is None else fitted.early.best_epoch(trainer)
    record = trainer.history.epochs[int(epoch) - 1]
    training, held_out = _exported_values(fitted, options)
    recorded = {key: value for key, value in record.items() if key.startswith("val_")}
    values = training | (recorded if held_out is None else held_out)
    if isinstance(fitted.x, TextPairs) and options.limit_batches is None:
        values |= measured(trainer, fitted.x, options, fitted.validation)
    best = _best_epoch(trainer)
    if options.json:
        document = {
            "directory": str(directory),
            "model": model,
            "stopped": trainer.history.stopped,
            "exported": {"epoch": int(epoch), **values},
            "best_epoch": best,
            **({} if fitted.before is None else {"before": fitted.before}),
            **({} if differences is None else {"differences": differences}),
        }
        history = trainer.history
        print_json({**document, "epochs": history.epochs, "evaluations": history.evaluations})
        return
    labels = metric_labels(trainer, fitted.classes, list(values))
    earlier = {key: f"{value:,.5g} → " for key, value in (fitted.before or {}).items()}
    rows: list[tuple[str, object]] = [
        (labels[key], f"{earlier.get(key, '')}{value:,.5g}") for key, value in values.items()
    ]
    rows.append(("learning_rate", f"{record['learning_rate']:,.5g}"))
    # The median, because the first epoch is slow on a cold machine.
    rows.append(("samples/s", f"{np.median(trainer.history.samples_per_second):,.0f}"))
    print_table(heading(_title(fitted, int(epoch))), summary_table(None, rows))
    if options.limit_batches is not None:
        print_table(_trial(trainer, options))
    if differences is not None and model is not None:
        print_table(_agreement(model, differences))
    # The weights of the better epoch are lost; the note is for the next run.
    if fitted.early is None and not fitted.averaged and best is not None and best < epoch:
        print_table(_got_worse(trainer, best, int(epoch)))
    print_table(f"Run: {directory}   Trained model: {model or 'none, the model has no outputs but its loss'}")
    if model is None:
        print_next("evaluate", directory, "--data", "FILE")
    else:
        print_prediction_command(directory, trainer.manifest.targets)


def _verified(fitted: Fitted, model: Path, options: TrainOptions) -> dict[str, float]:
    """Compares the exported model with the trainer on the first samples; returns the largest difference per output."""
    trainer, size = fitted.trainer, options.batch_size
    if fitted.encoder is None or fitted.table is None:
        inputs = [row[0] for row in fitted.x.texts] if isinstance(fitted.x, TextPairs) else fitted.x
        return trainer.verify_export(model, inputs, batch_size=size)
    # The exported model takes the columns of the table, the trainer's the encoded ones.
    state = trainer._state
    arrays = next(iter(prediction_source(state, fitted.x, Options(size)).read(Pass())))
    columns = fitted.encoder.raw_columns(fitted.table)
    filled = len(arrays[0]) if state.run.batch_size is None else state.run.batch_size
    feeds = {name: column[:filled] for name, column in columns.items()}
    return verify_export(state, model, arrays, feeds)


def _agreement(model: Path, differences: Mapping[str, float]) -> str:
    name = max(differences, key=lambda name: differences[name])
    return (
        f"Checked: the outputs of {model.name} on a batch are those in training, with a largest difference of "
        f"{differences[name]:.2g} ({name})"
    )


def _trial(trainer: Trainer, options: TrainOptions) -> str:
    """Describes the batches of a run with `--limit-batches`."""
    plan = trainer.last_fit
    of = ""
    if plan is not None and plan.samples is not None and plan.batch_size is not None:
        of = f" of {plan.samples:,} samples in batches of {plan.batch_size}"
    return (
        f"This was a trial: each epoch had --limit-batches {options.limit_batches}{of}. The figures are those of these "
        "batches. Leave the option out to train."
    )


def _title(fitted: Fitted, epoch: int) -> str:
    last = len(fitted.trainer.history.epochs)
    if fitted.averaged:
        return f"Exported weights: the average of the epochs from --swa-start to {epoch}"
    if fitted.early is None:
        return f"Exported weights: epoch {epoch}, the last one"
    which = "the last one" if epoch == last else f"of {last}"
    return f"Exported weights: epoch {epoch}, {which}, with the best {fitted.early.monitor}"


def _exported_values(
    fitted: Fitted, options: TrainOptions
) -> tuple[dict[str, float], dict[str, float] | None]:
    """Computes loss and metrics with the exported weights.

    Returns:
        Two dicts: values over the training data, without the samples split off for validation, and values over the
        validation data. The second is None if there is no validation data, or if the history already contains its
        values.
    """
    trainer = fitted.trainer
    data = Data(
        fitted.x,
        fitted.y,
        batch_size=options.batch_size,
        validation=fitted.validation,
        stratify=options.stratify,
    )
    source, held_out = fit_datasets(trainer._state, data)
    if (limit := chosen_limit(options)) is not None:
        source = limited(source, limit)
        held_out = None if held_out is None else limited(held_out, limit)
    values = trainer._state.evaluate(source)
    # For averaged weights, the history only has the values from before the averaging.
    if not fitted.averaged or held_out is None:
        return values, None
    return values, {f"val_{key}": value for key, value in trainer._state.evaluate(held_out).items()}


def _best_epoch(trainer: Trainer) -> int | None:
    """Returns the number of the epoch with the lowest validation loss in the last call to `fit`.

    Returns None if that call had no validation data.
    """
    epochs = [epoch for epoch in trainer.history.epochs[trainer.fit_start :] if "val_loss" in epoch]
    if not epochs:
        return None
    return int(epochs[best_index([epoch["val_loss"] for epoch in epochs], rises=False)]["epoch"])


def _got_worse(trainer: Trainer, best: int, last: int) -> str:
    lowest, now = (trainer.history.epochs[epoch - 1]["val_loss"] for epoch in (best, last))
    return (
        f"Validation was best after epoch {best} (val_loss {lowest:.5g}) and is worse after epoch {last} ({now:.5g}): "
        "--save-best exports the best."
    )
