"""The lowering table: ATen ops as ONNX ops, one module per family."""

from . import activation, comparison, creation, indexing, nn, pointwise, reduction, shape, symbolic

__all__ = [
    "activation",
    "comparison",
    "creation",
    "indexing",
    "nn",
    "pointwise",
    "reduction",
    "shape",
    "symbolic",
]
