"""Attention and embeddings. Attention itself comes as products, masks and a softmax."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from torch import fx

from onnxtrain.ortmodule._lowering import DTYPES, Lowering, lower
from onnxtrain.ortmodule.aten.indexing import counted


@lower("aten._safe_softmax.default")
def safe_softmax(low: Lowering, x: ir.Value, dim: int, dtype: Any = None) -> ir.Value:
    """Softmax that is zero, with zero gradients, for rows that are -inf throughout.

    Only a mask makes such rows, or the overflow of a whole row: without a mask this is a plain Softmax.
    """
    op = low.op
    x = low.tensor(x, low.dtype)
    if _is_product(low.node.args[0]):
        return op.Softmax(x, axis=dim)  # type: ignore[no-any-return]
    masked = op.Equal(op.ReduceMax(x, [dim], keepdims=1), op.const(float("-inf"), low.dtype))
    y = op.Softmax(op.Where(masked, op.const(0.0, low.dtype), x), axis=dim)
    return op.Where(masked, op.const(0.0, low.dtype), y)  # type: ignore[no-any-return]


def _is_product(node: Any) -> bool:
    """Whether a tensor is a product of matrices in another shape."""
    views = ("aten._unsafe_view.default", "aten.view.default", "aten.view_copy.default")
    while isinstance(node, fx.Node) and str(node.target) in views:
        node = node.args[0]
    return isinstance(node, fx.Node) and str(node.target) == "aten.bmm.default"


@lower("aten.embedding.default")
def embedding(
    low: Lowering,
    weight: ir.Value,
    indices: ir.Value,
    padding_idx: Any = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> ir.Value:
    """Gather; the row `padding_idx` is read, but gets no gradient."""
    if scale_grad_by_freq or sparse:
        raise low.unsupported("sparse gradients, or scaled by frequency")
    op = low.op
    rows = op.Gather(weight, counted(low, 1, indices), axis=0)
    if isinstance(padding_idx, int) and padding_idx < 0:
        return rows  # type: ignore[no-any-return]
    rows.shape = low.shape(low.result)
    is_padding = op.Unsqueeze(op.Equal(indices, low.tensor(padding_idx, DTYPES[low.fake(1).dtype])), [-1])
    return op.Where(is_padding, low.stopped(rows), rows)  # type: ignore[no-any-return]
