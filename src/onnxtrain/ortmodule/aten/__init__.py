"""The lowering table: ATen ops as ONNX ops, one module per family."""

from . import (
    attention,
    convolution,
    linalg,
    loss,
    normalization,
    pointwise,
    pooling,
    random,
    recurrent,
    reduction,
    shape,
)

__all__ = [
    "attention",
    "convolution",
    "linalg",
    "loss",
    "normalization",
    "pointwise",
    "pooling",
    "random",
    "recurrent",
    "reduction",
    "shape",
]
