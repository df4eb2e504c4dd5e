"""Runs `onnxtrain train --find-lr`: finds a learning rate, prints it, and trains nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.text import Text

from onnxtrain.cli._output import Content, heading, print_json, print_table
from onnxtrain.cli._train_options import TrainOptions
from onnxtrain.errors import InputError
from onnxtrain.trainer import Callback, LearningRateRange, Trainer
from onnxtrain.trainer._fit.datasets import Data, enable_sample_weights, fit_datasets
from onnxtrain.trainer._fit.learning_rate_range import START, STEPS, STOP, find_range

_BLOCKS = "▁▂▃▄▅▆▇█"
_INDENT = "  "
_WIDTH = 60


def check_find_rate(options: TrainOptions) -> None:
    """Raises InputError for options that the learning rate range test cannot follow."""
    if options.accumulate != 1:
        raise InputError(
            "--find-lr takes one batch per step. Leave --accumulate out, or raise --batch-size instead."
        )


def print_rate(
    trainer: Trainer,
    x: Any,
    y: Any,
    datasets: dict[str, Any],
    callbacks: Sequence[Callback],
    options: TrainOptions,
) -> None:
    """Runs the learning rate range test on the training data, and prints the suggestion and the curve.

    Args:
        trainer: the trainer of the run; its parameters and optimizer state are restored.
        x: inputs.
        y: targets.
        datasets: other arguments of `fit` that describe the data.
        callbacks: callbacks of the fit; parameters that they freeze in the first epoch are not trained.
        options: options of the command.
    """
    state = trainer._state
    state.workers.require_one("--find-lr")
    source, _ = fit_datasets(state, Data(x, y, **datasets))
    enable_sample_weights(state, source, for_fit=True)
    found = find_range(state, source, START, STOP, STEPS, trainer._frozen_until(callbacks))
    if options.json:
        print_json({"suggestion": found.suggestion, "rates": found.rates, "losses": found.losses})
        return
    print_table(*_described(found))


def _described(found: LearningRateRange) -> list[Content]:
    """Formats the result of a test: a line with the suggestion, and the curve of the loss."""
    if found.suggestion is None:
        return [
            heading("No learning rate is suggested"),
            f"The loss didn't fall at any of {len(found.rates)} rates up to {STOP:g}. Check the loss and the labels, "
            "or train with a --lr of your choice.",
        ]
    at = found.rates.index(found.suggestion)
    # The columns are means of a few steps, so that the line fits into any terminal.
    width = min(_WIDTH, len(found.losses))
    line = Text(_INDENT + curve([float(part.mean()) for part in np.array_split(found.losses, width)]))
    first, last = f"{found.rates[0]:.0e}", f"{found.rates[-1]:.0e}"
    marker = f"{_INDENT}{' ' * (at * width // len(found.losses))}▲ {found.suggestion:.1e}"
    axis = _INDENT + first + last.rjust(max(width - len(first), len(last) + 1))
    low, high = min(found.losses), max(found.losses)
    return [
        heading(f"Suggested learning rate: --lr {found.suggestion:.1e}"),
        f"Smoothed loss at rising learning rates, from {low:.4g} to {high:.4g}:",
        line,
        Text(marker),
        Text(axis),
        "At the mark, the loss falls fastest. Nothing was trained.",
    ]


def curve(values: Sequence[float]) -> str:
    """Draws values as a line of block characters, one for each value.

    >>> curve([0.0, 1.0, 3.5, 7.0])
    '▁▂▅█'
    """
    array = np.asarray(values, np.float64)
    low, high = float(array.min()), float(array.max())
    scaled = (array - low) / (high - low) if high > low else np.zeros_like(array)
    return "".join(_BLOCKS[round(float(value) * (len(_BLOCKS) - 1))] for value in scaled)
