"""The device of the tests that `make test-cuda` runs on a GPU as well."""

import os

DEVICE = os.environ.get("ONNXTRAIN_TEST_DEVICE", "cpu")
"""Name of the device, as `Module` takes it: "cpu" or "cuda"."""
