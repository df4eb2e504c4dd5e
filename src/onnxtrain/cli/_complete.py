"""Completes the values of options in the shell.

:data:`COMPLETIONS` has the options with names to choose from, in any command. Words that the name of a value lists,
such as "balanced" in `balanced|CLASS=WEIGHT`, are completed without an entry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, get_args

from onnxtrain._names import LOSSES, OPTIMIZERS
from onnxtrain.recipe import LayerMode, Profile
from onnxtrain.schedules import SCHEDULES

Completion = Callable[..., list[str]]


def complete_losses(incomplete: str) -> list[str]:
    """Completes the name of a loss in the shell: returns the names that begin with `incomplete`.

    >>> complete_losses("c")
    ['cross_entropy', 'causal_lm', 'ctc', 'cosine_embedding', 'cosine_similarity']
    """
    return _beginning(LOSSES, incomplete)


def complete_optimizers(incomplete: str) -> list[str]:
    """Completes the name of an optimizer in the shell: returns the names that begin with `incomplete`."""
    return _beginning(OPTIMIZERS, incomplete)


def complete_schedules(incomplete: str) -> list[str]:
    """Completes the name of a schedule in the shell: returns the names that begin with `incomplete`."""
    return _beginning(SCHEDULES, incomplete)


def complete_metrics(incomplete: str) -> list[str]:
    """Completes the name of a metric in the shell: returns the names that begin with `incomplete`."""
    # Imported here, because importing the trainer takes a second and only this completion needs it.
    from onnxtrain.trainer._metrics.metrics import METRICS

    return _beginning(METRICS, incomplete)


def _complete_recorded(incomplete: str) -> list[str]:
    """Completes the name of a recorded value, e.g. "val_loss" or "val_f1"."""
    names = ["loss", *complete_metrics("")]
    return _beginning([*(f"val_{name}" for name in names), *names], incomplete)


def _complete_loss_options(ctx: Any, incomplete: str) -> list[str]:
    """Completes NAME= of a setting of the loss that the command names, or of any loss."""
    from onnxtrain.losses import LOSSES as KINDS

    return _settings(KINDS, ctx.params.get("loss"), incomplete)


def _complete_optimizer_options(ctx: Any, incomplete: str) -> list[str]:
    """Completes NAME= of a setting of the optimizer that the command names, which has a default."""
    from onnxtrain.optimizers import OPTIMIZERS as KINDS

    return _settings(KINDS, ctx.params.get("optimizer"), incomplete)


def _complete_schedule_options(ctx: Any, incomplete: str) -> list[str]:
    """Completes NAME= of a setting of the schedule that the command names, or of any schedule."""
    return _settings(SCHEDULES, ctx.params.get("schedule"), incomplete)


def _settings(kinds: dict[str, type[Any]], chosen: str | None, incomplete: str) -> list[str]:
    some = [kinds[chosen]] if chosen in kinds else list(kinds.values())
    names = [f"{entry.name}=" for kind in some for entry in fields(kind)]
    return _beginning(dict.fromkeys(names), incomplete)


def _of(*words: str) -> Completion:
    """Returns a function that completes one of the words."""

    def complete(incomplete: str) -> list[str]:
        return _beginning(words, incomplete)

    return complete


COMPLETIONS: dict[str, Completion] = {
    "loss": complete_losses,
    "optimizer": complete_optimizers,
    "schedule": complete_schedules,
    "metric": complete_metrics,
    "monitor": _complete_recorded,
    "loss_option": _complete_loss_options,
    "optimizer_option": _complete_optimizer_options,
    "schedule_option": _complete_schedule_options,
    "device": _of("cpu", "cuda", "cuda:0", "cuda:1"),
    "status": _of("rule", "function", "nondifferentiable", "not-yet", "unknown"),
    "profile": _of(*get_args(Profile)),
    "batch_norm": _of(*get_args(LayerMode)),
}
"""Functions that complete the value of an option, by the name of its field."""


def completion_of(name: str, metavar: str | None) -> Completion | None:
    """Returns the function that completes the value of an option; None if any text may be its value.

    Args:
        name: name of the field.
        metavar: name of the value in `--help`, e.g. "balanced|CLASS=WEIGHT".

    >>> complete = completion_of("impute", "[COLUMN=]mean|median|value=VALUE")
    >>> complete("m"), complete("v")
    (['mean', 'median'], ['value='])
    """
    if name in COMPLETIONS:
        return COMPLETIONS[name]
    words = literals(metavar or "")
    return _of(*words) if words else None


def literals(metavar: str) -> list[str]:
    """Returns the words of a metavar that are values themselves, e.g. ["auto", "local"] for "auto|local|ADDRESS"."""
    parts = (re.sub(r"\[.*?\]", "", part) for part in metavar.split("|"))
    return [match[0] for part in parts if (match := re.match(r"[a-z][a-z_0-9]*=?(?![a-z.])", part))]


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
