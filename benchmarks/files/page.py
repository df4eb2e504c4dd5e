"""The page of the documentation, from the results."""

from __future__ import annotations

from typing import Any


def page(results: dict[str, dict[str, Any]]) -> str:
    return ""
