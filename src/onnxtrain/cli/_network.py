"""Makes the network of `onnxtrain train --network` for the columns of a table, and chooses what suits it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import onnx

from onnxtrain._names import LOSSES
from onnxtrain.cli._declared import flag
from onnxtrain.cli._output import info
from onnxtrain.cli._train_options import NetworkOptions, TrainOptions
from onnxtrain.errors import InputError
from onnxtrain.recipe import Recipe
from onnxtrain.surgery._perceptron import perceptron
from onnxtrain.tables import Table, TableEncoder

EPOCHS, STEPS = 20, 250
"""Least numbers of epochs and of optimizer steps for a new network. More steps overfit small tables, fewer are not
enough to learn from nothing (measured on scikit-learn's data sets)."""

# Whole numbers 0, 1, ... below this one are classes.
_MOST_CLASSES = 20

# Kinds of targets in `_names.LOSSES` that a network can be made for.
_KINDS = ("classes", "yes or no", "quantities", "counts")


def check_network(options: TrainOptions) -> None:
    """Raises InputError if neither a model nor `--network` is given, both are, or options belong to the other one."""
    if options.net.network is None:
        defaults = NetworkOptions()
        if others := [
            flag(name) for name, value in vars(options.net).items() if value != getattr(defaults, name)
        ]:
            raise InputError(f"{', '.join(others)} need --network, which makes a new network.")
        if options.source is None:
            raise InputError(
                "Pass the path of an .onnx file or the directory of a run, or --network mlp to train a new network "
                "on a table."
            )
        return
    if options.source is not None:
        raise InputError(
            f"--network makes a new network, but '{options.source}' is a model. Leave one of them out."
        )
    changes = {
        "--replace-head": options.model.replace_head,
        "--add-classes": options.model.add_classes,
        "--dynamic-batch": options.model.dynamic_batch,
    }
    for name, value in changes.items():
        if value:
            raise InputError(
                f"{name} changes a model; --network makes a network that fits the data. Leave it out."
            )


def with_epochs(options: TrainOptions, given: frozenset[str], rows: int) -> TrainOptions:
    """Returns options with the number of epochs that suits a new network and a table, unless it was given.

    Args:
        options: options of the command.
        given: names of the options that were given.
        rows: number of rows of the table.
    """
    if options.net.network is None or "epochs" in given:
        return options
    batches = math.ceil(rows / (options.batch_size or 32))
    return replace(options, epochs=max(EPOCHS, math.ceil(STEPS / batches)))


def with_loss(options: TrainOptions, encoder: TableEncoder, table: Table) -> TrainOptions:
    """Returns options with a loss that suits the target, unless `--loss` was given, and says which one it is.

    Strings, Booleans and the whole numbers 0, 1, ... are classes; other numbers are quantities.
    """
    if options.model.loss is not None:
        return options
    if not encoder.target:
        raise InputError(
            f"The table '{table.source}': name the column to predict with --target; its columns are "
            f"{', '.join(table.columns)}."
        )
    name = ", ".join(encoder.target)
    classes = encoder.find_classes(table)
    if classes is not None:
        loss, why = "cross_entropy", f"'{name}' has {len(classes)} classes"
    elif (count := _class_count(encoder, table)) is not None:
        loss, why = (
            "cross_entropy",
            f"'{name}' has the whole numbers 0 to {count - 1}, which are read as classes",
        )
    else:
        loss, why = "mse", f"'{name}' is a number" if len(encoder.target) == 1 else f"{name} are numbers"
    other = "mse" if loss == "cross_entropy" else "cross_entropy"
    info(f"Loss: {loss}, because {why}. To choose another one, pass --loss, e.g. --loss {other}.")
    return replace(options, model=replace(options.model, loss=loss))


def standardizes_target(options: TrainOptions) -> bool:
    """True if the target is standardized in training: by `--scale-target`, or for quantities by `--network`."""
    asked, loss = options.table.scale_target, options.model.loss
    if asked is not None:
        return asked
    return options.net.network is not None and loss in LOSSES and LOSSES[loss][1] == "quantities"


def made_network(
    options: TrainOptions, recipe: Recipe, encoder: TableEncoder, table: Table
) -> onnx.ModelProto:
    """Builds the network for the fitted encoder's columns and the target, and prints its sizes.

    Raises:
        InputError: `--hidden` is invalid, or no network can be made for the loss.
    """
    loss = str(options.model.loss)
    kind = LOSSES[loss][1] if loss in LOSSES else ""
    if kind not in _KINDS or loss == "nll":
        allowed = ", ".join(name for name, (_, k) in LOSSES.items() if k in _KINDS and name != "nll")
        raise InputError(f"--loss is {loss}; with --network, choose one of {allowed}.")
    features = sum(column.width for column in encoder.columns_)
    outputs = len(encoder.target)
    if kind == "classes":
        outputs = _labels_count(encoder, table)
    hidden = parse_hidden(options.net)
    model = perceptron(
        features,
        hidden,
        outputs,
        np.dtype(np.float32),
        options.seed,
        activation=options.net.activation,
        dropout=recipe.dropout if isinstance(recipe.dropout, float) else 0.0,
        output="scores" if kind in ("classes", "yes or no") else "prediction",
    )
    parameters = sum(int(np.prod(tensor.dims)) for tensor in model.graph.initializer)
    layers = f", hidden layers of {', '.join(map(str, hidden))} ({options.net.activation})" if hidden else ""
    sizes = (
        f"{count} {word}{'s' * (count != 1)}" for count, word in ((features, "input"), (outputs, "output"))
    )
    info(f"Network: {f'{layers}, '.join(sizes)}; {parameters:,} parameters")
    return model


def parse_hidden(options: NetworkOptions) -> list[int]:
    """Returns the sizes of `--hidden`, e.g. [64, 32]; [] for "0".

    Raises:
        InputError: a size is not a positive integer.
    """
    parts = [part.strip() for part in options.hidden.split(",")]
    if parts == ["0"]:
        return []
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(
            f"--hidden is '{options.hidden}'; pass sizes such as 64,32, or 0 for no hidden layer."
        )
    return list(map(int, parts))


def _class_count(encoder: TableEncoder, table: Table) -> int | None:
    """Returns the number of classes if the target is the whole numbers 0, 1, ..., each at least once, else None."""
    labels = encoder.transform_target(table)
    if labels.ndim != 1 or labels.dtype.kind != "i" or labels.min() != 0:
        return None
    count = len(np.unique(labels))
    return count if 1 < count == labels.max() + 1 <= _MOST_CLASSES else None


def _labels_count(encoder: TableEncoder, table: Table) -> int:
    if encoder.classes_ is not None:
        return len(encoder.classes_)
    if len(encoder.target) != 1:
        raise InputError(
            "--loss cross_entropy predicts one column; --target names several. Choose another loss."
        )
    labels = encoder.transform_target(table)
    # The trainer refuses negative labels and fractions, with a message that names them.
    highest = float(labels.max())
    if highest >= 10**6:
        raise InputError(
            f"The target '{encoder.target[0]}' has numbers up to {highest:,.0f}, which are too many classes. For a "
            f"quantity, pass --loss mse; for names of classes, --categorical {encoder.target[0]}."
        )
    return max(int(highest) + 1, 2)
