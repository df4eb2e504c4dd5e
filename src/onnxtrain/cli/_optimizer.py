"""Makes the optimizer of `--optimizer`, `--weight-decay` and `--optimizer-option`, with PyTorch's defaults."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from onnxtrain.cli._options import OptimizerOptions
from onnxtrain.errors import InputError
from onnxtrain.optimizers import Optimizer, make_optimizer

# Settings that are objects and cannot be typed in a shell; gradient clipping has an option of its own.
_IN_PYTHON = ("clip_grad", "groups")

_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}


def optimizer_settings(optimizer: Optimizer) -> dict[str, Any]:
    """Lists the settings that can be given in the shell, by name, with their values."""
    names = [field.name for field in fields(optimizer) if field.name not in _IN_PYTHON]
    return {name: getattr(optimizer, name) for name in names}


def chosen_optimizer(options: OptimizerOptions) -> Optimizer:
    """Makes the optimizer of a name with the settings that were given.

    Raises:
        GraphBuildError: there is no optimizer of that name, or it refuses a value.
        InputError: the optimizer has no such setting, or the value has another type.
    """
    name, weight_decay = options.optimizer, options.weight_decay
    optimizer = make_optimizer(name)
    settings = optimizer_settings(optimizer)
    defaults = ", ".join(f"{key}={_shown(value)}" for key, value in settings.items()) or "none"
    chosen: dict[str, Any] = {}
    for text in options.optimizer_option or ():
        key, equals, value = text.partition("=")
        if not equals or key in chosen:
            raise InputError(f"--optimizer-option '{text}' should be NAME=VALUE, each name once.")
        if key not in settings:
            raise InputError(
                f"--optimizer-option '{text}': {name} has no setting '{key}'. Its settings and their "
                f"defaults: {defaults}."
            )
        chosen[key] = _parsed(text, value, settings[key])
    if weight_decay is not None:
        # An optimizer without weight decay would ignore the option silently.
        if "weight_decay" not in settings or "weight_decay" in chosen:
            reason = "is given twice" if "weight_decay" in chosen else f"does not suit {name}, which has none"
            raise InputError(f"--weight-decay {weight_decay:g} {reason}. Settings of {name}: {defaults}.")
        chosen["weight_decay"] = weight_decay
    return type(optimizer)(**chosen)


def _parsed(option: str, text: str, default: Any) -> Any:
    """Parses the value of a setting; raises InputError unless it has the type of the default."""
    values = [
        _WORDS[word.lower()] if word.lower() in _WORDS else number_or_text(word)
        for word in map(str.strip, text.split(","))
    ]
    if isinstance(default, tuple):
        kinds_fit = len(values) == len(default) and all(
            value is None or _is_number(value) for value in values
        )
        if kinds_fit:
            return tuple(values)
        raise InputError(
            f"--optimizer-option '{option}' should be {len(default)} numbers, such as {_shown(default)}."
        )
    # A comma in the value of a setting that is no tuple belongs to its text.
    value = values[0] if len(values) == 1 else text
    # bool comes first, as True is an int in Python.
    if isinstance(default, bool | str) or (isinstance(default, int) and isinstance(value, int)):
        fits = type(value) is type(default)
    else:
        fits = _is_number(value) and not isinstance(default, int)
    if not fits:
        kind = {bool: "true or false", int: "a whole number", str: "a word"}.get(type(default), "a number")
        raise InputError(f"--optimizer-option '{option}' should be {kind}, such as {_shown(default)}.")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def number_or_text(text: str) -> int | float | str:
    """Reads an integer or a float; a text that is neither stays a text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_shown, value))
    return str(value).lower() if value is None or isinstance(value, bool) else f"{value}"
