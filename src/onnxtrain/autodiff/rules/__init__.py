"""One module per family of ops; importing this package registers them all."""

from . import (
    activation,
    control_flow,
    conv,
    einsum,
    indexing,
    linalg,
    loss,
    math,
    norm,
    pool,
    quantized,
    recurrent,
    reduction,
    sequence,
    shape,
    sources,
)

__all__ = [
    "activation",
    "control_flow",
    "conv",
    "einsum",
    "indexing",
    "linalg",
    "loss",
    "math",
    "norm",
    "pool",
    "quantized",
    "recurrent",
    "reduction",
    "sequence",
    "shape",
    "sources",
]
