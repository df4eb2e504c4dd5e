"""Write a finished model around what ONNX Runtime gets wrong or lacks: the last step of every way out."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.axes import PositiveAxesPass
from onnxtrain.passes.constants import lift_constants
from onnxtrain.passes.shapes import infer_shapes
from onnxtrain.passes.statistics import IsolateStatisticsPass
from onnxtrain.passes.widen import has_bfloat16, widen_bfloat16

__all__ = ["suit_runtime"]


def suit_runtime(model: ir.Model) -> ir.Model:
    """Return a model of known shapes that computes the same in ONNX Runtime; may change `model`.

    Running statistics are kept from being merged with weights, axes are counted from the front, lest reductions of
    an empty batch keep their shape, and bfloat16 is computed in float32, which the CPU provider has kernels for.
    """
    IsolateStatisticsPass()(model)
    model = widen_bfloat16(model) if has_bfloat16(model) else infer_shapes(model)
    if PositiveAxesPass()(model).modified:
        lift_constants(model)
    return model
