"""The lowering table: ATen ops as ONNX ops, one module per family."""

from . import (
    activation,
    attention,
    comparison,
    convolution,
    creation,
    indexing,
    linalg,
    loss,
    normalization,
    pointwise,
    pooling,
    random,
    recurrent,
    reduction,
    shape,
    symbolic,
)

__all__ = [
    "activation",
    "attention",
    "comparison",
    "convolution",
    "creation",
    "indexing",
    "linalg",
    "loss",
    "normalization",
    "pointwise",
    "pooling",
    "random",
    "recurrent",
    "reduction",
    "shape",
    "symbolic",
]
