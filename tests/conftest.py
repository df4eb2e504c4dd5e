"""Settings of all tests."""

import gc
import os

import pytest

# PyTorch's threads wait asleep, not spinning: with two workers on two processors that halves the time of many tests.
# PyTorch reads it when it is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

gc.set_threshold(10000, 20, 20)  # a capture makes objects by the hundred thousand


@pytest.fixture(scope="module", autouse=True)
def _what_earlier_tests_left() -> None:
    """Puts it aside: modules and caches of PyTorch are a million objects, which every full collection walks through."""
    gc.collect()
    gc.freeze()
