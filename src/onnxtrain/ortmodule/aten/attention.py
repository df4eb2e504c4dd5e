"""Attention and embeddings. Attention itself comes as products, masks and a softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from torch import fx
from torch.nn import functional

from onnxtrain import functions
from onnxtrain.ortmodule._gradients import straight_through
from onnxtrain.ortmodule._lowering import DTYPES, Lowering, lower
from onnxtrain.ortmodule.aten.counting import segment_of_each
from onnxtrain.ortmodule.aten.indexing import counted


@lower("aten._safe_softmax.default")
def safe_softmax(low: Lowering, x: ir.Value, dim: int, dtype: Any = None) -> ir.Value:
    """Softmax that is zero, with zero gradients, for rows that are -inf throughout.

    Only a mask makes such rows, or the overflow of a whole row: without a mask this is a plain Softmax.
    """
    op = low.op
    x = low.tensor(x, low.dtype)
    if _is_product(low.node.args[0]):
        return op.Softmax(x, axis=dim)
    if low.dtype == ir.DataType.FLOAT and low.fake(0).dim() > 0:
        return op.call(functions.safe_softmax, x, axis=dim)
    masked = op.Equal(op.ReduceMax(x, [dim], keepdims=1), op.const(float("-inf"), low.dtype))
    y = op.Softmax(op.Where(masked, op.const(0.0, low.dtype), x), axis=dim)
    return op.Where(masked, op.const(0.0, low.dtype), y)


def _is_product(node: Any) -> bool:
    """Whether a tensor is a product of matrices in another shape."""
    views = ("aten._unsafe_view.default", "aten.view.default", "aten.view_copy.default")
    while isinstance(node, fx.Node) and str(node.target) in views:
        node = node.args[0]
    return isinstance(node, fx.Node) and str(node.target) == "aten.bmm.default"


def _embedding(
    indices: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    if max_norm is not None:
        _bound_rows(weight, indices, max_norm, norm_type)
    return functional.embedding(indices, weight, padding_idx, None, norm_type, *args, **kwargs)


def _embedding_bag(
    indices: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    if max_norm is not None:
        _bound_rows(weight, indices, max_norm, norm_type)
    return functional.embedding_bag(indices, weight, offsets, None, norm_type, *args, **kwargs)


def _bound_rows(weight: torch.Tensor, indices: torch.Tensor, max_norm: float, norm_type: float) -> None:
    """`torch.embedding_renorm_`, a write inside of a function that autograd does not see: the gradient passes it."""
    norms = torch.linalg.vector_norm(weight, norm_type, dim=1, keepdim=True)
    read = torch.zeros_like(norms, dtype=torch.bool).index_fill(0, indices.reshape(-1), True)
    scale = torch.where(read & (norms > max_norm), max_norm / (norms + 1e-7), 1.0)
    weight.copy_(straight_through(weight.clone(), weight * scale))


EMBEDDINGS: dict[Any, Callable[..., Any]] = {
    functional.embedding: _embedding,
    functional.embedding_bag: _embedding_bag,
}
"""Functions that trace better when written in other terms."""


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
        return rows
    rows.shape = low.shape(low.result)
    is_padding = op.Unsqueeze(op.Equal(indices, low.tensor(padding_idx, DTYPES[low.fake(1).dtype])), [-1])
    return op.Where(is_padding, low.stopped(rows), rows)


_SUM, _MEAN, _MAX = range(3)


@lower("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
def embedding_bag(
    low: Lowering,
    weight: ir.Value,
    indices: ir.Value,
    offsets: ir.Value,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: ir.Value | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[ir.Value | None, ...]:
    """Sum, mean or maximum of the rows of each bag; a bag without rows is zero."""
    if scale_grad_by_freq or sparse or any(low.uses_result(i) for i in (1, 2, 3)):
        raise low.unsupported("sparse gradients, or scaled by frequency, or more than the bags")
    op = low.op
    indices, offsets = low.tensor(indices, ir.DataType.INT64), low.tensor(offsets, ir.DataType.INT64)
    count = op.Shape(indices)
    bags = op.Shape(offsets)
    if include_last_offset:
        bags = op.Sub(bags, [1])
        offsets = op.Slice(offsets, [0], bags, [0])
    bag = op.Sub(segment_of_each(low, offsets, count), [1])
    rows = op.Gather(weight, indices, axis=0)
    width = op.Shape(weight, start=1, end=2)
    real = op.Not(op.Equal(indices, op.const(padding_idx)))
    if per_sample_weights is not None:
        rows = op.Mul(rows, op.Unsqueeze(per_sample_weights, [1]))
    rows = op.Where(op.Unsqueeze(real, [1]), rows, op.const(-math.inf if mode == _MAX else 0.0, low.dtype))
    sizes = op.ScatterElements(
        op.Expand(op.const(0), bags), bag, op.Cast(real, to=ir.DataType.INT64), axis=0, reduction="add"
    )
    sizes = op.Unsqueeze(sizes, [1])
    start = op.Expand(op.const(-math.inf if mode == _MAX else 0.0, low.dtype), op.Concat(bags, width, axis=0))
    places = op.Expand(op.Unsqueeze(bag, [1]), op.Shape(rows))
    result = op.ScatterElements(start, places, rows, axis=0, reduction="max" if mode == _MAX else "add")
    if mode == _MEAN:
        result = op.Div(result, op.Cast(op.Max(sizes, [1]), to=low.dtype))
    elif mode == _MAX:
        result = op.Where(op.Equal(sizes, op.const(0)), op.const(0.0, low.dtype), result)
    return result, None, None, None
