"""The lowering table: ATen ops as ONNX ops, one module per family."""

from onnxtrain.ortmodule.lowering.aten import (
    activation,
    attention,
    comparison,
    convolution,
    counting,
    creation,
    ctc,
    indexing,
    linalg,
    loss,
    matrix_functions,
    normalization,
    order,
    pointwise,
    pooling,
    random,
    recurrent,
    reduction,
    shape,
    solving,
    special,
    symbolic,
)

# Complex numbers take over what the others have registered; `fourier` imports them, so it comes last, too.
from onnxtrain.ortmodule.lowering.aten import complex as complex_  # isort: skip
from onnxtrain.ortmodule.lowering.aten import fourier  # isort: skip

__all__ = [
    "activation",
    "attention",
    "comparison",
    "complex_",
    "convolution",
    "counting",
    "creation",
    "ctc",
    "fourier",
    "indexing",
    "linalg",
    "loss",
    "matrix_functions",
    "normalization",
    "order",
    "pointwise",
    "pooling",
    "random",
    "recurrent",
    "reduction",
    "shape",
    "solving",
    "special",
    "symbolic",
]
