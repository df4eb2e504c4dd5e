"""Offers the PyTorch optimizer of onnxruntime-training, `FusedAdam`, for training loops in PyTorch.

The room `optimizers` is another one: it writes optimizer steps as ONNX models.
"""

from __future__ import annotations

# First of all imports: where PyTorch is missing, the error then says what to install.
import onnxtrain._pytorch  # noqa: F401  # isort: skip

from onnxtrain.optim.fp16_optimizer import FP16_Optimizer
from onnxtrain.optim.fused_adam import AdamWMode, FusedAdam

__all__ = ["AdamWMode", "FP16_Optimizer", "FusedAdam"]
