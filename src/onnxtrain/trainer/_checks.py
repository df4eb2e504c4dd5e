"""Checks integers and switches from users, and the types of objects parsed from JSON."""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from onnxtrain.errors import InputError


def check_integer(name: str, value: Any, least: int = 1) -> int:
    """Checks that a value is an integer of at least `least`, and returns it as an int.

    Args:
        name: name for error messages.
        value: value to check.
        least: smallest allowed value.

    Raises:
        InputError: `value` is not an integer, is less than `least`, or does not fit into 64 bits.

    >>> check_integer("epochs", np.int64(3))
    3
    """
    # bool is a subclass of int: True would train for one epoch.
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise InputError(f"{name} must be an integer >= {least}, received {value!r}.")
    # numpy and ONNX Runtime have no larger integers, so such a run could not be resumed.
    if value >= 2**63:
        raise InputError(f"{name} must be less than 2**63, received {value}.")
    # The trainer saves its settings as JSON, which numpy integers do not support.
    return int(value)


def check_switch(name: str, value: Any) -> bool:
    """Checks that a value is True or False, or 1 or 0, and returns it as a bool.

    Args:
        name: name for error messages.
        value: value to check.

    Raises:
        InputError: `value` is something else, e.g. "false", which Python takes for true.

    >>> check_switch("shuffle", np.bool_(False))
    False
    """
    if isinstance(value, bool | np.bool_) or (isinstance(value, int | np.integer) and value in (0, 1)):
        return bool(value)
    raise InputError(f"{name} must be True or False, received {value!r}.")


def check_types(value: Any, kind: Any, name: str) -> None:
    """Raises ValueError unless a value parsed from JSON has the expected type. Integers must not be negative.

    Args:
        value: value to check.
        kind: expected type: a dataclass, `int`, `float`, `str`, `bool`, None, a literal, or a list, dict or union of
            these.
        name: name for error messages.

    >>> check_types({"a": [1, 2.0]}, dict[str, list[float]], "sums")
    >>> check_types({"a": [1, "x"]}, dict[str, list[float]], "sums")
    Traceback (most recent call last):
        ...
    ValueError: sums['a'][1] is 'x'
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if not any(_fits(value, option, name) for option in arguments):
            raise ValueError(f"{name} is {str(value)[:60]!r}")
    elif origin is Literal and isinstance(value, str) and value in arguments:
        pass
    elif origin is list and type(value) is list:
        for index, entry in enumerate(value):
            check_types(entry, arguments[0], f"{name}[{index}]")
    elif origin is dict and type(value) is dict:
        for key, entry in value.items():
            check_types(key, arguments[0], name)
            check_types(entry, arguments[1], f"{name}[{key!r}]")
    elif is_dataclass(kind) and isinstance(kind, type) and type(value) is kind:
        hints = get_type_hints(kind)
        for entry in fields(kind):
            check_types(getattr(value, entry.name), hints[entry.name], entry.name)
    # A whole float is often an integer in JSON.
    elif kind is float and type(value) is int and -(2**63) <= value < 2**63:
        pass
    elif type(value) is not kind and not (kind in (None, types.NoneType) and value is None):
        raise ValueError(f"{name} is {str(value)[:60]!r}")
    # JSON has integers of any size; numpy and ONNX Runtime do not.
    elif kind is int and not 0 <= value < 2**63:
        raise ValueError(f"{name} is {str(value)[:60]}")


def _fits(value: Any, kind: Any, name: str) -> bool:
    try:
        check_types(value, kind, name)
    except ValueError:
        return False
    return True
