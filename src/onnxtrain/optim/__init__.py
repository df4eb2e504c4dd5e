"""Provides onnxruntime-training's PyTorch optimizer, `FusedAdam`, for training loops in PyTorch.

Not to be confused with `onnxtrain.optimizers`, which builds optimizer steps as ONNX models.
"""

from __future__ import annotations

# Must be the first import: if PyTorch is not installed, the error then says what to install.
import onnxtrain._pytorch  # noqa: F401  # isort: skip

from onnxtrain.optim.fp16_optimizer import FP16_Optimizer
from onnxtrain.optim.fused_adam import AdamWMode, FusedAdam

__all__ = ["AdamWMode", "FP16_Optimizer", "FusedAdam"]
