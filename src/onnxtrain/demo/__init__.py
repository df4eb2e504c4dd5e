"""Trains a convolutional network on handwritten digits, and verifies the exported file."""

from __future__ import annotations

import onnxtrain._desk  # noqa: F401  # isort: skip

from onnxtrain.demo._digits import DemoResult, load_digits_data, run_demo
from onnxtrain.demo._model import digits_network

__all__ = ["DemoResult", "digits_network", "load_digits_data", "run_demo"]
