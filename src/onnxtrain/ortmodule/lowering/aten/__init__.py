"""Lowers ATen ops to ONNX ops. Each module contains one family of ops.

Importing this package fills the lowering table.
"""

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
    einsum,
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
    searching,
    shape,
    solving,
    special,
    symbolic,
    view_writes,
)
from onnxtrain.ortmodule.lowering.aten.complex import register_linear_functions

# After all imports: derives lowerings for complex tensors from those for real tensors.
register_linear_functions()
