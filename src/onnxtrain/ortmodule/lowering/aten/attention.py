"""Lowers scaled dot-product attention, embeddings and embedding bags.

PyTorch's tracing decomposes attention into matmuls, masking and softmax, whose activations would be kept for the
backward pass. `ATTENTION` traces it as the custom op `onnxtrain::attention` instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import onnx_ir as ir
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from onnxtrain import functions
from onnxtrain.ortmodule.capture.autograd._gradients import straight_through
from onnxtrain.ortmodule.lowering._table import DTYPES, Lowering, lower
from onnxtrain.ortmodule.lowering.aten.counting import segment_numbers
from onnxtrain.ortmodule.lowering.aten.indexing import checked_indices

_LIBRARY = torch.library.Library("onnxtrain", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, float scale) -> Tensor"
)


@torch.library.register_fake("onnxtrain::attention")  # type: ignore[untyped-decorator]
def _fake_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


@register_flop_formula(torch.ops.onnxtrain.attention)
def _flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *args: Any, **named: Any) -> int:
    """Returns the number of floating-point operations of attention's two matrix products, given the input shapes."""
    return 2 * prod(q[:3]) * k[2] * (q[3] + v[3])


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Replaces `scaled_dot_product_attention`: calls the op `onnxtrain::attention` if it supports the arguments.

    Otherwise, calls PyTorch's function.
    """
    # The op supports a mask or causal attention, but not both, and neither dropout nor grouped-query attention.
    is_basic = not dropout_p and not enable_gqa and not (is_causal and attn_mask is not None)
    if not is_basic or not _is_supported(query, key, value, attn_mask):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return torch.ops.onnxtrain.attention(query, key, value, attn_mask, is_causal, factor)  # type: ignore[no-any-return]


def _is_supported(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """True if `functions.attention` supports the tensors: float32 on the CPU, [batch, heads, length, head size]."""
    if any(x.dim() != 4 or x.dtype != torch.float32 or x.device.type != "cpu" for x in (q, k, v)):
        return False
    # Autocast computes attention in bfloat16. The default scale needs a fixed head size other than 0.
    if torch.is_autocast_enabled("cpu") or not isinstance(q.shape[3], int) or not q.shape[3]:
        return False
    if mask is not None:
        if mask.dtype not in (torch.bool, torch.float32) or mask.dim() > 4:
            return False
        sizes = zip(reversed(mask.shape), (k.shape[2], q.shape[2], q.shape[1], q.shape[0]), strict=False)
        # Mask sizes must be equal or 1. Comparing symbols without `statically_known_true` would add guards.
        if not all(dim == 1 or statically_known_true(dim == size) for dim, size in sizes):
            return False
    equal_pairs = [*zip(q.shape[:2], k.shape[:2], strict=True), *zip(q.shape[:2], v.shape[:2], strict=True)]
    return statically_known_true(k.shape[2] > 0) and all(
        statically_known_true(a == b) for a, b in equal_pairs
    )


ATTENTION: dict[Any, Callable[..., Any]] = {functional.scaled_dot_product_attention: _attention}
"""Replacements for attention functions when a Dynamo graph is traced."""


@lower("onnxtrain.attention.default")
def attention(
    low: Lowering,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    mask: ir.Value | None,
    is_causal: bool,
    scale: float,
) -> ir.Value:
    """Lowers to a call to one of the attention functions in `functions`.

    As in PyTorch, the output and the gradients are zero for queries whose keys are all masked.
    """
    op = low.op
    if mask is None:
        kind = functions.causal_attention if is_causal else functions.attention
        y, log_sum = op.call(kind, q, k, v, scale=scale, _outputs=2)
    else:
        if mask.dtype == ir.DataType.BOOL:
            # The function takes an additive mask.
            mask = op.Where(mask, op.const(0.0, low.dtype), op.const(-math.inf, low.dtype))
        y, log_sum = op.call(functions.safe_masked_attention, q, k, v, mask, scale=scale, _outputs=2)
    # The gradient rule needs this shape, which shape inference does not know.
    log_sum.shape = ir.Shape(low.shape(low.result)[:3])
    return y


@lower("aten._safe_softmax.default")
def safe_softmax(low: Lowering, x: ir.Value, dim: int, dtype: Any = None) -> ir.Value:
    """Lowers a softmax that returns zeros, with zero gradients, for rows in which all elements are -inf."""
    op = low.op
    x = low.tensor(x, low.dtype)
    # A matrix product without a mask has no rows of -inf, except if a whole row overflows.
    if _is_matmul(low.node.args[0]):
        return op.Softmax(x, axis=dim)
    if low.dtype == ir.DataType.FLOAT and low.fake(0).dim() > 0:
        return op.call(functions.safe_softmax, x, axis=dim)
    is_masked = op.Equal(op.ReduceMax(x, [dim], keepdims=1), op.const(float("-inf"), low.dtype))
    y = op.Softmax(op.Where(is_masked, op.const(0.0, low.dtype), x), axis=dim)
    return op.Where(is_masked, op.const(0.0, low.dtype), y)


def _is_matmul(node: Any) -> bool:
    """True if the node is a batched matrix product, or a view of one."""
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
    """Replaces `embedding`, so that tracing records the in-place update of the weight for `max_norm`."""
    if max_norm is not None:
        _renormalize_rows(weight, indices, max_norm, norm_type)
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
    """Replaces `embedding_bag`, so that tracing records the in-place update of the weight for `max_norm`."""
    if max_norm is not None:
        _renormalize_rows(weight, indices, max_norm, norm_type)
    return functional.embedding_bag(indices, weight, offsets, None, norm_type, *args, **kwargs)


def _renormalize_rows(weight: torch.Tensor, indices: torch.Tensor, max_norm: float, norm_type: float) -> None:
    """Scales the rows of `weight` at `indices`, in place, to norms of at most `max_norm`.

    Does the same as `torch.embedding_renorm_`, which tracing does not support.
    """
    norms = torch.linalg.vector_norm(weight, norm_type, dim=1, keepdim=True)
    is_read = torch.zeros_like(norms, dtype=torch.bool).index_fill(0, indices.reshape(-1), True)
    scale = torch.where(is_read & (norms > max_norm), max_norm / (norms + 1e-7), 1.0)
    # Autograd does not see PyTorch's write, so the gradient passes straight through.
    weight.copy_(straight_through(weight.clone(), weight * scale))


EMBEDDINGS: dict[Any, Callable[..., Any]] = {
    functional.embedding: _embedding,
    functional.embedding_bag: _embedding_bag,
}
"""Replacements for embedding functions when a Dynamo graph is traced."""


@lower("aten.embedding.default")
def embedding(
    low: Lowering,
    weight: ir.Value,
    indices: ir.Value,
    padding_idx: Any = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> ir.Value:
    if scale_grad_by_freq or sparse:
        raise low.unsupported("sparse gradients, or gradients scaled by frequency")
    op = low.op
    rows = op.Gather(weight, checked_indices(low, 1, indices), axis=0)
    if isinstance(padding_idx, int) and padding_idx < 0:
        return rows
    # The row `padding_idx` is read like any other, but gets no gradient.
    rows.shape = low.shape(low.result)
    is_padding = op.Unsqueeze(op.Equal(indices, low.tensor(padding_idx, DTYPES[low.fake(1).dtype])), [-1])
    return op.Where(is_padding, low.op.stop_gradient(rows), rows)


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
    """Lowers to a Gather of rows and a ScatterND that reduces each bag. Empty bags are zero.

    Returns:
        The reduced bags, [bags, embedding size], and None for each of the other three results.

    Raises:
        UnsupportedATenOp: another result is used, or gradients must be sparse or scaled by frequency.
    """
    if scale_grad_by_freq or sparse or any(low.uses_result(i) for i in (1, 2, 3)):
        raise low.unsupported(
            "sparse gradients, gradients scaled by frequency, or uses of more than the first result"
        )
    op = low.op
    indices, offsets = low.tensor(indices, ir.DataType.INT64), low.tensor(offsets, ir.DataType.INT64)
    count = op.Shape(indices)
    low.check(op.Equal(op.Slice(offsets, [0], [1]), 0), "offsets[0] has to be 0")
    low.check(op.LessOrEqual(offsets, count), "offsets must not be greater than the number of indices")
    bags = op.Shape(offsets)
    if include_last_offset:
        bags = op.Sub(bags, [1])
        offsets = op.Slice(offsets, [0], bags, [0])
    bag = op.Sub(segment_numbers(low, offsets, count), [1])
    rows = op.Gather(weight, checked_indices(low, 1, indices), axis=0)
    width = op.Shape(weight, start=1, end=2)
    # Indices equal to padding_idx belong to no bag.
    is_real = op.Not(op.Equal(indices, op.const(padding_idx)))
    if per_sample_weights is not None:
        rows = op.Mul(rows, op.Unsqueeze(per_sample_weights, [1]))
    rows = op.Where(op.Unsqueeze(is_real, [1]), rows, op.const(-math.inf if mode == _MAX else 0.0, low.dtype))
    sizes = op.ScatterElements(
        op.Expand(op.const(0), bags), bag, op.Cast(is_real, to=ir.DataType.INT64), axis=0, reduction="add"
    )
    sizes = op.Unsqueeze(sizes, [1])
    start = op.Expand(op.const(-math.inf if mode == _MAX else 0.0, low.dtype), op.Concat(bags, width, axis=0))
    # One scatter for all bags: their number and sizes depend on the data.
    reduction = "max" if mode == _MAX else "add"
    result = op.ScatterND(start, op.Unsqueeze(bag, [1]), rows, reduction=reduction)
    if mode == _MEAN:
        result = op.Div(result, op.Cast(op.Max(sizes, [1]), to=low.dtype))
    elif mode == _MAX:
        result = op.Where(op.Equal(sizes, op.const(0)), op.const(0.0, low.dtype), result)
    return result, None, None, None
