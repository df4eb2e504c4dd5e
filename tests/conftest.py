"""Settings of all tests."""

import os

# PyTorch's threads wait asleep, not spinning: with two workers on two processors that halves the time of many tests.
# PyTorch reads it when it is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
