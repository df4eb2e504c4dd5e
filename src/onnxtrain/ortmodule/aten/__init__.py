"""The lowering table: ATen ops as ONNX ops, one module per family."""

from . import (
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

# Complex numbers take over what the others have registered.
from . import complex as complex_  # isort: skip
from . import fourier  # isort: skip

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
