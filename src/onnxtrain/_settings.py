"""Checks and converts the settings of losses, optimizers and gradient clipping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from onnxtrain._words import argument
from onnxtrain.errors import GraphBuildError


def require(owner: object, field: str, is_valid: Callable[[Any], bool], allowed: str) -> None:
    """Raises GraphBuildError unless the value of a field is valid.

    Args:
        owner: the loss, optimizer or clipping that has the field.
        field: name of the field, e.g. "weight_decay".
        is_valid: returns True for valid values. If it raises TypeError or ValueError, the value is invalid.
        allowed: describes the valid values, e.g. "a positive number".
    """
    value = getattr(owner, field)
    # Comparing a string with a number raises TypeError, converting it to float ValueError: both are invalid settings.
    try:
        valid = is_valid(value)
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise GraphBuildError(
            f"making {type(owner).__name__}: {argument(field)} is {value!r}; it must be {allowed}"
        )


def integers_to_floats(owner: Any) -> None:
    """Converts integers in the float fields of a frozen dataclass, e.g. `weight_decay=1`, to floats in place."""
    # The emitter turns a Python integer into an int64 constant, which cannot be multiplied with a float tensor.
    for field in fields(owner):
        value = getattr(owner, field.name)
        if "float" in str(field.type):
            if type(value) is int:
                object.__setattr__(owner, field.name, float(value))
            elif isinstance(value, tuple) and any(type(item) is int for item in value):
                converted = tuple(float(item) if type(item) is int else item for item in value)
                object.__setattr__(owner, field.name, converted)


def settings_text(settings: Mapping[str, Any]) -> str:
    """Returns settings as a single line of text.

    >>> settings_text({"betas": [0.9, 0.999], "weight_decay": 0.01})
    'betas=[0.9, 0.999], weight_decay=0.01'
    """
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())
