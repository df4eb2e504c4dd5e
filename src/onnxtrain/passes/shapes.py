"""Infer dtypes and shapes with symbolic dimensions."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

__all__ = ["infer_shapes"]


def infer_shapes(model: ir.Model) -> ir.Model:
    """Annotate the values of `model` in place with the dtypes and shapes that onnx can infer, and return it.

    Shape computations are followed through Shape, Gather, Concat and the like. Initializers of more than 1 kB
    are not serialised. Ops that onnx does not know end the inference downstream of them; they are no error.
    """
    ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
    return model
