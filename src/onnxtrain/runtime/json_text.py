"""Parses JSON from untrusted files."""

from __future__ import annotations

import json
from typing import Any


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a dict of the pairs in a JSON object; raises ValueError for a duplicate key."""
    result = dict(pairs)
    # Readers differ in which of two duplicate keys they use, so they could see different checkpoints in one file.
    if len(result) < len(pairs):
        raise ValueError("a JSON object has the same key twice")
    return result


def parse_json(text: str | bytes) -> Any:
    """Parses JSON. Also accepts NaN, Infinity and -Infinity, which `json.dumps` writes for non-finite floats.

    >>> parse_json('{"a": [1, NaN]}')
    {'a': [1, nan]}

    Raises:
        ValueError: the text is not JSON, has a duplicate key, or is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    # Not chained, because the traceback of a RecursionError is as deep as the text.
    except RecursionError:
        raise ValueError("a JSON text is nested too deeply") from None


def list_of_texts(value: object, what: str) -> list[str]:
    """Checks that `value` is a list of distinct strings, and returns it.

    Raises:
        ValueError: `value` is not a list of strings, or has duplicates. The message begins with `what`, e.g. "the
            moments".
    """
    if (
        not isinstance(value, list)
        or not all(isinstance(v, str) for v in value)
        or len(set(value)) < len(value)
    ):
        raise ValueError(f"{what} is not a list of distinct names")
    return value


def sizes(value: object, what: str) -> tuple[int, ...]:
    """Checks that `value` is a list of tensor sizes, e.g. [4, 8], and returns it as a tuple.

    Args:
        value: the parsed JSON value of a shape.
        what: name of the tensor for the error message, e.g. "'fc.weight'".

    Raises:
        ValueError: `value` is not a list of non-negative integers below 2^63.
    """
    # `type`, because True is an integer for isinstance. Sizes of an OrtValue are int64.
    if not isinstance(value, list) or not all(type(d) is int and 0 <= d < 2**63 for d in value):
        raise ValueError(f"the shape of {what} is not a list of sizes")
    return tuple(value)
