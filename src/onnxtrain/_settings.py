"""Checks of the settings of losses, optimizers and gradient clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxtrain.errors import GraphBuildError


def require(owner: object, field: str, holds: Callable[[Any], bool], allowed: str) -> None:
    """Raises GraphBuildError naming a field of `owner` unless `holds` of its value, or cannot say so."""
    value = getattr(owner, field)
    try:
        valid = holds(value)
    except (TypeError, ValueError):  # a comparison with something that is no number
        valid = False
    if not valid:
        raise GraphBuildError(f"making {type(owner).__name__}: {field} is {value!r}; it must be {allowed}")
