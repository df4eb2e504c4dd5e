"""Creates a :class:`Recipe` from the options of `train`, `artifacts` and `plan`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from onnxtrain.cli._command_options import ArtifactsOptions, PlanOptions
from onnxtrain.cli._declared import flag, flat
from onnxtrain.cli._lora import chosen_lora
from onnxtrain.cli._loss import chosen_loss
from onnxtrain.cli._optimizer import chosen_optimizer
from onnxtrain.cli._train_options import TrainOptions
from onnxtrain.errors import InputError
from onnxtrain.recipe import Recipe, ShellOption


def chosen_recipe(options: TrainOptions | ArtifactsOptions | PlanOptions, *, mixed: bool = False) -> Recipe:
    """Creates the recipe that the options of a command describe.

    Args:
        options: options of the command.
        mixed: True if training mixes samples (mixup, CutMix), so that cross-entropy's targets are class probabilities.

    Raises:
        GraphBuildError: a value is out of range, or there is no loss or optimizer of that name.
        InputError: a value cannot be parsed, or options cannot be combined.
    """
    values = flat(options)
    chosen: dict[str, Any] = {}
    for entry in fields(Recipe):
        shell = entry.metadata["shell"]
        if not isinstance(shell, ShellOption) or (name := shell.name or entry.name) not in values:
            continue
        value = values[name]
        if shell.parse is not None:
            try:
                value = shell.parse(value)
            except ValueError as error:
                raise InputError(f"{flag(name)} {error}") from None
        # If the option is not given, the field's default applies.
        if value is not None:
            chosen[entry.name] = value
    return Recipe(
        loss=chosen_loss(options.model, mixed=mixed),
        optimizer=chosen_optimizer(options.optimizer),
        # `plan` tries adapters of several ranks.
        lora=None if isinstance(options, PlanOptions) else chosen_lora(options.lora),
        **chosen,
    )
