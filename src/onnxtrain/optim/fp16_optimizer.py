"""Rejects onnxruntime-training's `FP16_Optimizer`, which has no counterpart here, and names the alternatives."""

from __future__ import annotations

from typing import Any, NoReturn

from onnxtrain.errors import CompatError

__all__ = ["FP16_Optimizer"]


def FP16_Optimizer(optimizer: Any, **options: Any) -> NoReturn:
    """Always raises an error that says what to use instead.

    In onnxruntime-training, it replaced methods of Apex, DeepSpeed and Megatron optimizers with CUDA kernels.

    Raises:
        CompatError: always.
    """
    # The name exists so that a script that imports it gets this advice instead of an ImportError.
    raise CompatError(
        f"FP16_Optimizer({type(optimizer).__name__}): onnxtrain has no counterpart. Use the optimizer as it is, "
        "with torch.autocast and, for float16, torch.amp.GradScaler('cuda'); bfloat16 needs no scaler. DeepSpeed and "
        "Megatron scale losses themselves: leave the call out"
    )
