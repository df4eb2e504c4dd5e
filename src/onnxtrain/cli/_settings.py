"""Parses the values of NAME=VALUE options, such as `--loss-option`, as settings of a loss or optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from onnxtrain.errors import InputError

_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}


class Owner(NamedTuple):
    """The optimizer or loss whose settings a NAME=VALUE option sets.

    Attributes:
        flag: the option, e.g. "--optimizer-option".
        name: name of the optimizer or loss, e.g. "adamw".
        settings: names and defaults of the settings, e.g. {"eps": 1e-8}.
        optional: names of the settings that may be None, e.g. {"alpha"}.
    """

    flag: str
    name: str
    settings: Mapping[str, Any]
    optional: frozenset[str] = frozenset()

    @property
    def described(self) -> str:
        """Lists the settings and their defaults, e.g. "betas=0.9,0.999, eps=1e-08"."""
        return ", ".join(f"{key}={_shown(value)}" for key, value in self.settings.items()) or "none"


def split_settings(flag: str, texts: Sequence[str] | None) -> dict[str, str]:
    """Splits the values of a repeatable NAME=VALUE option, and returns a dict from names to values.

    Args:
        flag: the option, e.g. "--loss-option".
        texts: values of the option, e.g. ["delta=0.5"].

    Raises:
        InputError: a text is not NAME=VALUE, or a name is given twice.

    >>> split_settings("--loss-option", ["delta=0.5"])
    {'delta': '0.5'}
    """
    split: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or name in split:
            raise InputError(f"{flag} '{text}' should be NAME=VALUE, with each name given once.")
        split[name] = value
    return split


def parse_settings(owner: Owner, texts: Sequence[str] | None) -> dict[str, Any]:
    """Parses the values of a NAME=VALUE option as settings of `owner`.

    Raises:
        InputError: a text is not NAME=VALUE, there is no such setting, or a value has the wrong type.

    >>> parse_settings(Owner("--loss-option", "huber", {"delta": 1.0}), ["delta=0.5"])
    {'delta': 0.5}
    """
    chosen: dict[str, Any] = {}
    for key, value in split_settings(owner.flag, texts).items():
        text = f"{key}={value}"
        if key not in owner.settings:
            raise InputError(
                f"{owner.flag} '{text}': {owner.name} has no setting '{key}'. Its settings and their "
                f"defaults: {owner.described}."
            )
        chosen[key] = _parsed(owner, text, key, value)
    return chosen


def _parsed(owner: Owner, option: str, key: str, text: str) -> Any:
    """Converts the value of a setting to the type of its default.

    Args:
        owner: the optimizer or loss.
        option: the NAME=VALUE text, for error messages.
        key: name of the setting.
        text: its value.

    Raises:
        InputError: the value does not have the type of the default.
    """
    default = owner.settings[key]
    values = [
        _WORDS[word.lower()] if word.lower() in _WORDS else number_or_text(word)
        for word in map(str.strip, text.split(","))
    ]
    if key in owner.optional:
        if values == [None]:
            return None
        # If the default is None, any number (e.g. an axis) or list of numbers (e.g. class weights) is accepted.
        if default is None and all(map(_is_number, values)):
            return values[0] if len(values) == 1 else values
    if isinstance(default, tuple):
        kinds_fit = len(values) == len(default) and all(
            value is None or _is_number(value) for value in values
        )
        if kinds_fit:
            return tuple(values)
        raise InputError(
            f"{owner.flag} '{option}' should be {len(default)} numbers, such as {_shown(default)}."
        )
    # Only tuples are split at commas: for other settings, a comma is part of the text.
    value = values[0] if len(values) == 1 else text
    # bool is checked first, because True is an int in Python.
    if isinstance(default, bool | str) or (isinstance(default, int) and isinstance(value, int)):
        fits = type(value) is type(default)
    else:
        fits = _is_number(value) and not isinstance(default, int)
    if not fits:
        kind = {bool: "true or false", int: "a whole number", str: "a word"}.get(type(default), "a number")
        example = "1,5,1" if default is None else _shown(default)
        raise InputError(f"{owner.flag} '{option}' should be {kind}, such as {example}.")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def names_python(text: str) -> bool:
    """True if the value of `--loss` names an object in a Python file, e.g. "losses.py:detection", or only the file."""
    return text.endswith(".py") or ".py:" in text


def number_or_text(text: str) -> int | float | str:
    """Converts a text to an int or float; returns it unchanged if it is not a number."""
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
