"""Reads JSON texts from files that somebody else may have written."""

from __future__ import annotations

import json
from typing import Any


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a dict of the pairs in a JSON object; ValueError if a key occurs twice."""
    result = dict(pairs)
    # Readers differ in which of two equal keys they take, so two of them could see different checkpoints in one file.
    if len(result) < len(pairs):
        raise ValueError("a JSON object has the same key twice")
    return result


def parse_json(text: str | bytes) -> Any:
    """Parses a JSON text. NaN and Infinity become floats, as `json.dumps` writes them.

    >>> parse_json('{"a": [1, NaN]}')
    {'a': [1, nan]}

    Raises:
        ValueError: the text is no JSON, has a key twice in one object, or is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    # Not chained: the traceback of a RecursionError is as deep as the text.
    except RecursionError:
        raise ValueError("a JSON text is nested too deeply") from None


def list_of_texts(value: object, what: str) -> list[str]:
    """Checks that `value` is a list of different strings and returns it.

    Raises:
        ValueError: it is not; `what` begins the message, e.g. "the moments".
    """
    if (
        not isinstance(value, list)
        or not all(isinstance(v, str) for v in value)
        or len(set(value)) < len(value)
    ):
        raise ValueError(f"{what} is no list of different names")
    return value


def sizes(value: object, what: str) -> tuple[int, ...]:
    """Checks that `value` is a list of sizes, e.g. [4, 8], and returns it as a tuple.

    Raises:
        ValueError: it is not; `what` names the tensor in the message, e.g. "'fc.weight'".
    """
    # `type`, as True is an integer for isinstance; the sizes of an OrtValue are int64.
    if not isinstance(value, list) or not all(type(d) is int and 0 <= d < 2**63 for d in value):
        raise ValueError(f"the shape of {what} is no list of sizes")
    return tuple(value)
