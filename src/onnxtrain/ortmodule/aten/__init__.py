"""The lowering table: ATen ops as ONNX ops, one module per family."""

from . import nn, pointwise, reduction, shape

__all__ = ["nn", "pointwise", "reduction", "shape"]
