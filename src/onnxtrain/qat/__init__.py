"""Trains the integer weights of a quantized model (quantization-aware training, QAT).

`prepare` puts float32 masters under the integers, training moves the masters by straight-through gradients, and
`convert` rounds them to integers again.
"""

from __future__ import annotations

# First of all imports: where onnx is missing, the error then says what to install.
import onnxtrain._desk  # noqa: F401  # isort: skip

from onnxtrain.qat._convert import convert
from onnxtrain.qat._prepare import prepare

__all__ = ["convert", "prepare"]
