from __future__ import annotations

import numpy as np
import pytest

from runtime import handmade


@pytest.fixture
def mlp_dir(tmp_path):
    """Directory with the artifacts of the hand-made MLP."""
    return handmade.mlp().save(tmp_path)


@pytest.fixture
def batch():
    """A batch for the MLP: x [5, 4], labels [5]."""
    rng = np.random.default_rng(7)
    return rng.standard_normal((5, 4)).astype(np.float32), np.array([0, 1, 2, 1, 0])
