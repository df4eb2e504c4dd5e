"""Files that commands read and write."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def arrays_in(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, which is closed again."""
    with np.load(path) as content:
        return dict(content)
