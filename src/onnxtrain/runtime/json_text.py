"""JSON texts from files that somebody else may have written."""

from __future__ import annotations

import json
from typing import Any


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a JSON object has the same key twice")
    return result


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text; NaN and infinities are floats, as `json.dumps` writes them.

    >>> parse_json('{"a": [1, NaN]}')
    {'a': [1, nan]}

    Raises:
        ValueError: No JSON, a key twice in one object (readers differ in which one they take), or nested too
            deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:  # not chained: its traceback is as deep as the text
        raise ValueError("a JSON text is nested too deeply") from None


def list_of_texts(value: object, what: str) -> list[str]:
    """Returns `value` if it is a list of str without repetitions; ValueError, which says `what`, if not."""
    if (
        not isinstance(value, list)
        or not all(isinstance(v, str) for v in value)
        or len(set(value)) < len(value)
    ):
        raise ValueError(f"{what} is no list of different names")
    return value


def sizes(value: object, what: str) -> tuple[int, ...]:
    """Returns a shape: sizes from 0 on; ValueError, which says `what`, for anything else."""
    if not isinstance(value, list) or not all(type(d) is int and 0 <= d < 2**63 for d in value):
        raise ValueError(f"the shape of {what} is no list of sizes")
    return tuple(value)
