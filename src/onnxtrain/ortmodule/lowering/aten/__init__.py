"""Lowers ATen ops to ONNX ops. Importing this package fills the lowering table; one module per family of ops."""

from onnxtrain.ortmodule.lowering.aten import (  # noqa: F401
    activation,
    arithmetic,
    attention,
    comparison,
    convolution,
    counting,
    creation,
    ctc,
    cumulative,
    fourier,
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
    resizing,
    shape,
    solving,
    special,
    symbolic,
    view_writes,
)
from onnxtrain.ortmodule.lowering.aten.complex import lower_linear_functions

# Behind all imports: it lowers for complex numbers what the other modules have lowered for real ones.
lower_linear_functions()
