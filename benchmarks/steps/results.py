"""The raw results: one JSON file, into which each run merges what it measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["merge", "read"]


def read(path: Path) -> dict[str, Any]:
    """Returns the results by case; empty where there are none yet."""
    return json.loads(path.read_text()) if path.exists() else {}


def merge(
    path: Path,
    case: str,
    kind: str,
    measured: Mapping[str, Any],
    setting: Mapping[str, Any],
    about: Mapping[str, Any],
) -> None:
    """Puts what was measured of a case into the file.

    Times of engines are compared within one run only, so that a run replaces all times of the case; first steps are
    measured one engine at a time and are replaced one by one.
    """
    everything = read(path)
    found = everything.setdefault(case, {})
    found["artifacts"] = {key: about[key] for key in ("export_s", "artifacts_s", "nodes")}
    previous = found.get(kind, {}).get("engines", {}) if kind == "first" else {}
    found[kind] = {"setting": dict(setting), "engines": previous | dict(measured)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")
