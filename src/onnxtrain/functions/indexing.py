"""Defines the gradient of an embedding lookup."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import Emitter

from ._composite import composite


@composite(
    "EmbeddingGradient",
    ["ct", "indices", "shape"],
    dtypes={"indices": ir.DataType.INT64, "shape": ir.DataType.INT64},
)
def embedding_gradient(op: Emitter, ct: ir.Value, indices: ir.Value, shape: ir.Value) -> ir.Value:
    """VJP of Gather along axis 0: scatter-adds the rows of ct into zeros of shape `shape`, at `indices`.

    ct: `[*indices, *rest]`; indices: int64 of any shape, in [-n, n); shape: `[n, *rest]`.
    """
    zeros = op.Expand(op.const(0, like=ct), shape)
    return op.ScatterND(zeros, op.Unsqueeze(indices, [-1]), ct, reduction="add")
