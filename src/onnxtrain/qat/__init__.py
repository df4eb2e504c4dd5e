"""Trains the integer weights of a quantized model (quantization-aware training, QAT).

`prepare` replaces the integers with float32 master weights that the graph quantizes, training updates the master
weights with straight-through gradients, and `convert` rounds them back to integers.
"""

from __future__ import annotations

# The first import: if onnx is missing, its error message says what to install.
import onnxtrain._desk  # noqa: F401  # isort: skip

from onnxtrain.qat._convert import convert
from onnxtrain.qat._prepare import prepare

__all__ = ["convert", "prepare"]
