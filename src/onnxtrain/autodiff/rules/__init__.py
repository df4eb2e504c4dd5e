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
    pool,
    quantized,
    recurrent,
    reduction,
    sequence,
    shape,
    signal,
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
    "pool",
    "quantized",
    "recurrent",
    "reduction",
    "sequence",
    "shape",
    "signal",
    "sources",
]
