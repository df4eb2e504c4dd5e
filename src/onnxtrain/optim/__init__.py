"""Offers the PyTorch optimizer of onnxruntime-training, `FusedAdam`, for training loops in PyTorch.

The room `optimizers` is another one: it writes optimizer steps as ONNX models.
"""

from __future__ import annotations

# PyTorch is no dependency of the package: it is needed by those who train in PyTorch.
try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "importing onnxtrain.optim: PyTorch is not installed; pip install 'onnxtrain[torch]'", name="torch"
    ) from error

from onnxtrain.optim.fp16_optimizer import FP16_Optimizer
from onnxtrain.optim.fused_adam import AdamWMode, FusedAdam

__all__ = ["AdamWMode", "FP16_Optimizer", "FusedAdam"]
