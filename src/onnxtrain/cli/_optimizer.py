"""Creates the optimizer from `--optimizer`, `--weight-decay` and `--optimizer-option`, with PyTorch's defaults."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from onnxtrain.cli._options import OptimizerOptions
from onnxtrain.cli._settings import Owner, parse_settings
from onnxtrain.errors import InputError
from onnxtrain.optimizers import Optimizer, make_optimizer

# Settings whose values are objects, which cannot be given in a shell. Gradient clipping has options of its own.
_IN_PYTHON = ("clip_grad", "groups")


def optimizer_settings(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the settings of an optimizer that the command line can set, as a dict from names to values."""
    names = [field.name for field in fields(optimizer) if field.name not in _IN_PYTHON]
    return {name: getattr(optimizer, name) for name in names}


def chosen_optimizer(options: OptimizerOptions) -> Optimizer:
    """Creates the optimizer from `--optimizer`, `--weight-decay` and `--optimizer-option`.

    Raises:
        GraphBuildError: there is no optimizer of that name, or a value is out of range.
        InputError: the optimizer has no such setting, or a value has the wrong type.
    """
    name, weight_decay = options.optimizer, options.weight_decay
    optimizer = make_optimizer(name)
    owner = Owner("--optimizer-option", name, optimizer_settings(optimizer))
    chosen = parse_settings(owner, options.optimizer_option)
    if weight_decay is not None:
        # An optimizer without weight decay would silently ignore the option.
        if "weight_decay" not in owner.settings or "weight_decay" in chosen:
            reason = "is given twice" if "weight_decay" in chosen else f"does not suit {name}, which has none"
            raise InputError(
                f"--weight-decay {weight_decay:g} {reason}. Settings of {name}: {owner.described}."
            )
        chosen["weight_decay"] = weight_decay
    return type(optimizer)(**chosen)
