"""Attention of onnxruntime's domain com.microsoft, in standard ops; see :mod:`onnxtrain.autodiff.rules.contrib`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import defbody
from onnxtrain.autodiff.rules._contrib import MS, refused
from onnxtrain.emitter import Emitter


@defbody(
    "Attention", MS, "input weights bias mask_index past attention_bias past_sequence_length", "output present",
    num_heads=None, unidirectional=0, scale=None, qkv_hidden_sizes=None, mask_filter_value=-10000.0, do_rotary=0,
    rotary_embedding_dim=0, past_present_share_buffer=0,
)  # fmt: skip
def attention(op: Emitter, n: NodeView) -> ir.Value:
    """Self-attention, from the layer's input: input·weights + bias are queries, keys and values."""
    if n.past is not None or n.past_sequence_length is not None or n.attr("do_rotary"):
        raise refused(n, "a cache or rotary embeddings")
    joint = op.MatMul(n.input, n.weights)
    joint = joint if n.bias is None else op.Add(joint, n.bias)
    return attention_of(
        op, n, joint, [n.attention_bias] if n.attention_bias is not None else [], n.attr("qkv_hidden_sizes")
    )


def attention_of(
    op: Emitter, n: NodeView, joint: ir.Value, bias: list[ir.Value], sizes: Sequence[int] | None = None
) -> ir.Value:
    """Returns the attention of queries, keys and values that lie beside each other, by the mask of a node.

    Args:
        op: emitter.
        n: the node.
        joint: `[batch, sequence, hidden]`.
        bias: what is added to the scores.
        sizes: how many of the last axis are queries, keys and values; by default a third each.
    """
    if sizes:
        q, k, v = op.Split(joint, list(sizes), axis=-1, _outputs=3)
    else:
        q, k, v = op.Split(joint, axis=-1, num_outputs=3, _outputs=3)
    if n.mask_index is not None:
        bias = [*bias, _mask(op, n, n.mask_index, op.Shape(joint, start=1, end=2), joint)]
    return _attention(op, n, (q, k, v), bias)


@defbody(
    "MultiHeadAttention", MS,
    "query key value bias key_padding_mask attention_bias past_key past_value past_sequence_length cache_indirection",
    "output present_key present_value qk",
    num_heads=None, unidirectional=0, scale=None, mask_filter_value=-10000.0,
)  # fmt: skip
def multi_head_attention(op: Emitter, n: NodeView) -> ir.Value:
    """Attention of queries, keys and values `[batch, sequence, hidden]`."""
    if n.past_key is not None or n.past_value is not None or n.key is None or n.value is None:
        raise refused(n, "a cache or packed queries, keys and values")
    if any(n.rank(value) != 3 for value in (n.query, n.key, n.value)):
        raise refused(n, "queries, keys or values that are not [batch, sequence, hidden]")
    values = [n.query, n.key, n.value]
    if n.bias is not None:
        last = [op.Shape(value, start=-1) for value in values]
        parts = op.Split(n.bias, op.Concat(*last, axis=0), axis=0, _outputs=3)
        values = [op.Add(value, part) for value, part in zip(values, parts, strict=True)]
    bias = [n.attention_bias] if n.attention_bias is not None else []
    if n.key_padding_mask is not None:
        bias.append(_mask(op, n, n.key_padding_mask, op.Shape(n.key, start=1, end=2), n.key))
    return _attention(op, n, values, bias)


def _mask(op: Emitter, n: NodeView, mask: ir.Value, keys: ir.Value, like: ir.Value) -> ir.Value:
    """What is added to the scores `[batch, heads, queries, keys]`.

    A mask is 1 where a key counts; of rank 1 it says how many do.
    """
    rank = n.rank(mask)
    if rank == 1:
        places = op.Range(0, op.Squeeze(keys, [0]), 1)
        counts = op.Less(places, op.Unsqueeze(op.Cast(mask, to=ir.DataType.INT64), [1]))
        counts = op.Unsqueeze(counts, [1, 2])
    elif rank in (2, 3):
        counts = op.Unsqueeze(op.Cast(mask, to=ir.DataType.BOOL), [1, 2] if rank == 2 else [1])
    else:
        raise refused(n, f"a mask of rank {rank}")
    out = op.const(n.attr("mask_filter_value"), like=like)
    return op.Where(counts, op.const(0.0, like=like), out)


def _attention(op: Emitter, n: NodeView, values: Sequence[ir.Value], bias: Sequence[ir.Value]) -> ir.Value:
    heads = n.attr("num_heads")
    q, k, v = (op.Transpose(op.Reshape(x, [0, 0, heads, -1]), perm=[0, 2, 1, 3]) for x in values)
    scores = op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2]))
    if n.attr("scale"):
        scores = op.Mul(scores, n.attr("scale"))
    else:
        size = op.CastLike(op.Squeeze(op.Shape(q, start=-1), [0]), q)
        scores = op.Div(scores, op.Sqrt(size))
    for term in bias:
        scores = op.Add(scores, term)
    if n.attr("unidirectional"):
        scores = op.Where(_later(op, scores), op.const(float(np.finfo(np.float32).min), like=scores), scores)
    y = op.MatMul(op.Softmax(scores, axis=-1), v)
    return op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, -1])


def _later(op: Emitter, scores: ir.Value, before: int = 0) -> ir.Value:
    """Whether a key comes after the query, or `before` places or more before it: the last axes are queries and keys."""
    sizes = op.Shape(scores, start=-2)
    rows, columns = (op.Squeeze(size, [0]) for size in op.Split(sizes, axis=0, num_outputs=2, _outputs=2))
    row = op.Unsqueeze(op.Add(op.Range(0, rows, 1), op.Sub(columns, rows)), [1])
    column = op.Range(0, columns, 1)
    later = op.Greater(column, row)
    return op.Or(later, op.LessOrEqual(column, op.Sub(row, op.const(before)))) if before else later


@defbody(
    "RotaryEmbedding", MS, "input position_ids cos_cache sin_cache", "output",
    interleaved=0, num_heads=0, rotary_embedding_dim=0, scale=1.0, is_packed_batching=0,
)  # fmt: skip
def rotary_embedding(op: Emitter, n: NodeView) -> ir.Value:
    """Pairs of features are turned by the angles of their positions."""
    rank = n.rank(n.input)
    if n.attr("rotary_embedding_dim") or n.attr("is_packed_batching") or n.attr("scale") not in (1.0, 0.0):
        raise refused(n, "part of the features, a scale or packed batches")
    half = op.Shape(n.cos_cache, start=1)
    if rank == 3:  # [batch, sequence, heads * size]
        per_head = op.Concat([0], [0], [-1], op.Mul(half, [2]), axis=0)
        x = op.Reshape(n.input, per_head)
    else:  # [batch, heads, sequence, size]
        x = op.Transpose(n.input, perm=[0, 2, 1, 3])
    positions = n.position_ids
    if n.rank(positions) == 1:  # where the sequence starts
        length = op.Squeeze(op.Shape(x, start=1, end=2), [0])
        positions = op.Unsqueeze(op.Add(op.Range(0, length, 1), positions), [0])
    y = _turned(op, n, x, positions, n.attr("interleaved"))
    return op.Reshape(y, op.Shape(n.input)) if rank == 3 else op.Transpose(y, perm=[0, 2, 1, 3])


def _turned(op: Emitter, n: NodeView, x: ir.Value, positions: ir.Value, interleaved: int) -> ir.Value:
    """Turns the features of `[batch, sequence, heads, size]` by the caches of a node; all of them."""
    half = op.Shape(n.cos_cache, start=1)
    cos, sin = (op.Unsqueeze(op.Gather(cache, positions), [2]) for cache in (n.cos_cache, n.sin_cache))
    if interleaved:
        pairs = op.Reshape(x, op.Concat([0], [0], [0], half, [2], axis=0))
        a, b = (op.Squeeze(part, [-1]) for part in op.Split(pairs, axis=-1, num_outputs=2, _outputs=2))
    else:
        a, b = op.Split(x, axis=-1, num_outputs=2, _outputs=2)
    turned = [op.Sub(op.Mul(a, cos), op.Mul(b, sin)), op.Add(op.Mul(b, cos), op.Mul(a, sin))]
    if interleaved:
        return op.Reshape(op.Concat(*(op.Unsqueeze(part, [-1]) for part in turned), axis=-1), op.Shape(x))
    return op.Concat(*turned, axis=-1)


_GROUPED = (
    "query key value past_key past_value seqlens_k total_sequence_length cos_cache sin_cache position_ids "
    "attention_bias head_sink k_scale v_scale q_norm_weight k_norm_weight query_seqlens"
)
_REFUSED = _GROUPED.split()[10:]
"""Inputs that ask for what is not written here."""


@defbody(
    "GroupQueryAttention", MS, _GROUPED, "output present_key present_value output_qk",
    causal=1, do_rotary=0, k_norm_epsilon=None, k_quant_type=None, kv_cache_bit_width=None, kv_num_heads=None,
    local_window_size=-1, num_heads=None, q_norm_epsilon=None, qk_norm_epsilon=None, qk_output=0,
    rotary_interleaved=0, scale=None, sliding_window_cache=0, smooth_softmax=0, softcap=None, v_quant_type=None,
)  # fmt: skip
def group_query_attention(op: Emitter, n: NodeView) -> list[ir.Value]:
    """Causal attention of whole sequences, of which several heads of queries share one of keys and values.

    Sequences that are shorter have their padding behind them, which no query before it sees.
    """
    if any(getattr(n, name) is not None for name in _REFUSED) or n.attr("smooth_softmax") in (1, True):
        raise refused(n, "biases, sinks, norms of queries and keys or smooth softmax")
    if n.past_key is not None and list(n.past_key.shape or [None])[2:3] != [0]:
        raise refused(n, "a cache (a past of size 0 is none)")
    heads, shared = n.attr("num_heads"), n.attr("kv_num_heads")
    if n.key is None:  # all in one
        joint = op.Reshape(n.query, [0, 0, heads + 2 * shared, -1])
        q, k, v = op.Split(joint, [heads, shared, shared], axis=2, _outputs=3)
    else:
        q = op.Reshape(n.query, [0, 0, heads, -1])
        k, v = (op.Reshape(value, [0, 0, shared, -1]) for value in (n.key, n.value))
    if n.attr("do_rotary"):
        length = op.Squeeze(op.Shape(n.query, start=1, end=2), [0])
        first = op.Unsqueeze(op.Range(0, length, 1), [0])
        positions = first if n.position_ids is None else n.position_ids
        q, k = (_turned(op, n, x, positions, n.attr("rotary_interleaved")) for x in (q, k))
    k, v = (op.Transpose(x, perm=[0, 2, 1, 3]) for x in (k, v))
    size = op.Shape(q, start=-1)
    per_group = op.Concat([0], [0], [shared], [heads // shared], size, axis=0)
    q = op.Transpose(op.Reshape(q, per_group), perm=[0, 2, 3, 1, 4])
    scores = op.MatMul(q, op.Transpose(op.Unsqueeze(k, [2]), perm=[0, 1, 2, 4, 3]))
    if n.attr("scale"):
        scores = op.Mul(scores, n.attr("scale"))
    else:
        scores = op.Div(scores, op.Sqrt(op.CastLike(op.Squeeze(size, [0]), q)))
    if n.attr("softcap"):
        scores = op.Mul(op.Tanh(op.Div(scores, n.attr("softcap"))), n.attr("softcap"))
    if n.attr("causal"):
        hidden = _later(op, scores, max(n.attr("local_window_size"), 0))
        scores = op.Where(hidden, op.const(float(np.finfo(np.float32).min), like=scores), scores)
    y = op.MatMul(op.Softmax(scores, axis=-1), op.Unsqueeze(v, [2]))
    y = op.Reshape(op.Transpose(y, perm=[0, 3, 1, 2, 4]), [0, 0, -1])
    return [y, k, v]
