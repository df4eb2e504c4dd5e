"""Trains the integer weights of a quantized model (quantization-aware training, QAT).

`prepare` replaces the integers with quantized float32 masters, training updates the masters with straight-through
gradients, and `convert` rounds them to integers again.
"""

from __future__ import annotations

# The first import: if onnx is missing, its error message says what to install.
import onnxtrain._desk  # noqa: F401  # isort: skip

from onnxtrain.qat._convert import convert
from onnxtrain.qat._prepare import prepare

__all__ = ["convert", "prepare"]
