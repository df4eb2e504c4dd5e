"""Commands in processes of their own."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(*more: Path) -> dict[str, str]:
    """Return the environment of a process that finds this package and `more`, with the settings of the calling test."""
    path = os.pathsep.join(map(str, [*more, ROOT / "src"]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
