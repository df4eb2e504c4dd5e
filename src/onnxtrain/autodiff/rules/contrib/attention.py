"""Decomposes com.microsoft attention and rotary embedding ops into standard ops."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff._bodies import defbody
from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff.rules.contrib._shared import MS, unsupported
from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.functions import causal_attention


@defbody(
    "Attention", MS, "input weights bias mask_index past attention_bias past_sequence_length", "output present",
    num_heads=None, unidirectional=0, scale=None, qkv_hidden_sizes=None, mask_filter_value=-10000.0, do_rotary=0,
    rotary_embedding_dim=0, past_present_share_buffer=0,
)  # fmt: skip
def attention(op: Emitter, n: NodeView) -> list[ir.Value]:
    """Decomposes Attention: self-attention with queries, keys and values split from input·weights + bias.

    The cached keys and values in `past`, [2, batch, heads, sequence, size], precede the new ones.
    """
    # The kernel overwrites a shared buffer of keys and values in place, which a functional graph cannot express.
    if n.past_sequence_length is not None or n.attr("do_rotary"):
        raise unsupported(n, "a cache that is updated in place, or rotary embeddings")
    joint = op.MatMul(n.input, n.weights)
    joint = joint if n.bias is None else op.Add(joint, n.bias)
    return attention_of(
        op, n, joint, [n.attention_bias] if n.attention_bias is not None else [], n.attr("qkv_hidden_sizes")
    )


def attention_of(
    op: Emitter, n: NodeView, joint: ir.Value, bias: list[ir.Value], sizes: Sequence[int] | None = None
) -> list[ir.Value]:
    """Computes attention from packed queries, keys and values.

    Args:
        op: emitter.
        n: the node.
        joint: queries, keys and values, concatenated along the last axis of `[batch, sequence, hidden]`.
        bias: terms to add to the scores, each broadcasting to `[batch, heads, queries, keys]`.
        sizes: sizes of queries, keys and values along the last axis, e.g. (8, 8, 16). Default: a third each.

    Returns:
        The attention output and, if the node has a second output, the stacked keys and values.
    """
    if sizes:
        q, k, v = op.Split(joint, list(sizes), axis=-1, _outputs=3)
    else:
        q, k, v = op.Split(joint, axis=-1, num_outputs=3, _outputs=3)
    q, k, v = (_split_heads(op, n, x) for x in (q, k, v))
    if n.past is not None:
        past = (op.Squeeze(part, [0]) for part in op.Split(n.past, axis=0, num_outputs=2, _outputs=2))
        k, v = (op.Concat(before, x, axis=2) for before, x in zip(past, (k, v), strict=True))
    if n.mask_index is not None:
        bias = [*bias, _additive_mask(op, n, n.mask_index, op.Shape(k, start=2, end=3), joint)]
    y = _attention(op, n, (q, k, v), bias)
    # `present` is emitted only if the node has this output.
    if len(n.node.outputs) == 1:
        return [y]
    return [y, op.Concat(op.Unsqueeze(k, [0]), op.Unsqueeze(v, [0]), axis=0)]


@defbody(
    "MultiHeadAttention", MS,
    "query key value bias key_padding_mask attention_bias past_key past_value past_sequence_length cache_indirection",
    "output present_key present_value qk",
    num_heads=None, unidirectional=0, scale=None, mask_filter_value=-10000.0,
)  # fmt: skip
def multi_head_attention(op: Emitter, n: NodeView) -> list[ir.Value]:
    """Decomposes MultiHeadAttention: queries, keys and values are `[batch, sequence, hidden]`.

    Cached keys and values precede the new ones. Queries, keys and values can be packed into one tensor, `[batch,
    sequence, heads, 3, size]`, or only keys and values, `[batch, sequence, heads, 2, size]`. Unpacked keys and values
    can also be `[batch, heads, sequence, size]`.
    """
    if n.past_sequence_length is not None or n.cache_indirection is not None:
        raise unsupported(n, "a cache that is updated in place")
    values = _unpacked(op, n)
    apart = [n.rank(value) == 4 for value in values]
    if n.bias is not None:
        if any(apart):
            raise unsupported(n, "a bias of packed inputs")
        # A single vector for all three, whose parts are as long as the last axes, which may differ.
        last = [op.Shape(value, start=-1) for value in values]
        parts = op.Split(n.bias, op.Concat(*last, axis=0), axis=0, _outputs=3)
        values = [op.Add(value, part) for value, part in zip(values, parts, strict=True)]
    q, k, v = (x if done else _split_heads(op, n, x) for x, done in zip(values, apart, strict=True))
    if n.past_key is not None and n.past_value is not None:
        k, v = op.Concat(n.past_key, k, axis=2), op.Concat(n.past_value, v, axis=2)
    bias = [n.attention_bias] if n.attention_bias is not None else []
    if n.key_padding_mask is not None:
        bias.append(_additive_mask(op, n, n.key_padding_mask, op.Shape(k, start=2, end=3), k))
    return [_attention(op, n, (q, k, v), bias), k, v]


def _unpacked(op: Emitter, n: NodeView) -> list[ir.Value]:
    """Returns the queries, keys and values of a MultiHeadAttention as separate tensors.

    Raises:
        NoGradientRule: the packed tensor is not of rank 5.
    """
    if n.key is not None and n.value is not None:
        return [n.query, n.key, n.value]
    source = n.query if n.key is None else n.key
    count = 3 if n.key is None else 2
    if n.rank(source) != 5:
        raise unsupported(n, f"a packed input of rank {n.rank(source)}")
    parts = op.Split(source, axis=3, num_outputs=count, _outputs=count)
    split = [op.Transpose(op.Squeeze(part, [3]), perm=[0, 2, 1, 3]) for part in parts]
    # Shape inference has not seen these; rank 4 tells the caller that their heads are already split.
    for part in split:
        part.shape = ir.Shape([None] * 4)
    return split if n.key is None else [n.query, *split]


def _split_heads(op: Emitter, n: NodeView, x: ir.Value) -> ir.Value:
    """Splits a value `[batch, sequence, hidden]` into heads: `[batch, heads, sequence, size]`."""
    result: ir.Value = op.Transpose(op.Reshape(x, [0, 0, n.attr("num_heads"), -1]), perm=[0, 2, 1, 3])
    return result


def _additive_mask(op: Emitter, n: NodeView, mask: ir.Value, keys: ir.Value, like: ir.Value) -> ir.Value:
    """Returns a term to add to the scores `[batch, heads, queries, keys]`: 0 for valid keys, else mask_filter_value.

    Args:
        op: emitter.
        n: the node.
        mask: of rank 1, the number of valid keys of each sequence; of rank 2 or 3, a mask that is 1 for valid keys.
        keys: number of keys, int64 [1].
        like: value whose dtype the term gets.

    Raises:
        NoGradientRule: the mask is not of rank 1, 2 or 3.
    """
    rank = n.rank(mask)
    if rank == 1:
        places = op.Range(0, op.Squeeze(keys, [0]), 1)
        counts = op.Less(places, op.Unsqueeze(op.Cast(mask, to=ir.DataType.INT64), [1]))
        counts = op.Unsqueeze(counts, [1, 2])
    elif rank in (2, 3):
        counts = op.Unsqueeze(op.Cast(mask, to=ir.DataType.BOOL), [1, 2] if rank == 2 else [1])
    else:
        raise unsupported(n, f"a mask of rank {rank}")
    out = op.const(n.attr("mask_filter_value"), like=like)
    return op.Where(counts, op.const(0.0, like=like), out)


def _attention(op: Emitter, n: NodeView, values: Sequence[ir.Value], bias: Sequence[ir.Value]) -> ir.Value:
    """Computes attention of q, k, v `[batch, heads, sequence, size]`; returns `[batch, sequence, heads * size]`."""
    q, k, v = values
    scores = op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2]))
    # An absent or zero scale means 1 / sqrt(size).
    if n.attr("scale"):
        scores = op.Mul(scores, n.attr("scale"))
    else:
        size = op.CastLike(op.Squeeze(op.Shape(q, start=-1), [0]), q)
        scores = op.Div(scores, op.Sqrt(size))
    for term in bias:
        scores = op.Add(scores, term)
    # The lowest float instead of minus infinity, which would give NaN for a query without visible keys.
    if n.attr("unidirectional"):
        scores = op.Where(
            _hidden_keys(op, scores), op.const(float(np.finfo(np.float32).min), like=scores), scores
        )
    y = op.MatMul(op.Softmax(scores, axis=-1), v)
    return op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, -1])


def _hidden_keys(op: Emitter, scores: ir.Value, before: int = 0, places: ir.Value | None = None) -> ir.Value:
    """Returns a mask, bool `[..., queries, keys]`: True for keys to which the query must not attend.

    Keys after the query are hidden. If `before` is not 0, keys that are at least `before` positions earlier than the
    query are hidden as well.

    Args:
        op: emitter.
        scores: tensor whose last two axes are queries and keys.
        before: number of visible keys up to and including the query's position, e.g. 128; 0 for no limit.
        places: position of each query among the keys, `[..., queries]`. Default: the last query is at the last key.
    """
    sizes = op.Shape(scores, start=-2)
    rows, columns = (op.Squeeze(size, [0]) for size in op.Split(sizes, axis=0, num_outputs=2, _outputs=2))
    if places is None:
        places = op.Add(op.Range(0, rows, 1), op.Sub(columns, rows))
    row = op.Unsqueeze(places, [-1])
    # Reshaped because shape inference doesn't know the length of a Range.
    column = op.Reshape(op.Range(0, columns, 1), op.Shape(scores, start=-1))
    later = op.Greater(column, row)
    return op.Or(later, op.LessOrEqual(column, op.Sub(row, op.const(before)))) if before else later


@defbody(
    "RotaryEmbedding", MS, "input position_ids cos_cache sin_cache", "output",
    interleaved=0, num_heads=0, rotary_embedding_dim=0, scale=1.0, is_packed_batching=0,
)  # fmt: skip
def rotary_embedding(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes RotaryEmbedding: rotates pairs of features by angles that depend on the position."""
    rank = n.rank(n.input)
    if n.attr("is_packed_batching") or n.attr("scale") not in (1.0, 0.0):
        raise unsupported(n, "a scale or packed batches")
    part, heads = n.attr("rotary_embedding_dim"), n.attr("num_heads")
    # If all features are rotated, the cosines determine the size of a head.
    size = None if part else op.Mul(op.Shape(n.cos_cache, start=1), [2])
    if rank == 3:  # [batch, sequence, heads * size]
        per_head = [0, 0, heads, -1] if size is None else op.Concat([0], [0], [-1], size, axis=0)
        x = op.Reshape(n.input, per_head)
    else:  # [batch, heads, sequence, size]
        x = op.Transpose(n.input, perm=[0, 2, 1, 3])
    positions = n.position_ids
    # A single position is the offset of the whole sequence.
    if n.rank(positions) == 1:
        length = op.Squeeze(op.Shape(x, start=1, end=2), [0])
        positions = op.Unsqueeze(op.Add(op.Range(0, length, 1), positions), [0])
    y = _rotate(op, n, x, positions, n.attr("interleaved"), whole=not part)
    return op.Reshape(y, op.Shape(n.input)) if rank == 3 else op.Transpose(y, perm=[0, 2, 1, 3])


def _rotate(
    op: Emitter, n: NodeView, x: ir.Value, positions: ir.Value, interleaved: int, *, whole: bool
) -> ir.Value:
    """Rotates features of `[batch, sequence, heads, size]` by the angles in the node's cos_cache and sin_cache.

    The caches have one row per position and one column per rotated pair of features. If `interleaved`, neighboring
    features form pairs; otherwise, the first half of the features is paired with the second half. If `whole` is False,
    the caches may cover only the leading features, as in Phi; the remaining features are not rotated.
    """
    half = op.Shape(n.cos_cache, start=1)
    if not whole:
        end, last = op.Mul(half, [2]), op.const([sys.maxsize])
        x, rest = op.Slice(x, [0], end, [3]), op.Slice(x, end, last, [3])
        return op.Concat(_rotate(op, n, x, positions, interleaved, whole=True), rest, axis=3)
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


_GROUP_QUERY_INPUTS = (
    "query key value past_key past_value seqlens_k total_sequence_length cos_cache sin_cache position_ids "
    "attention_bias head_sink k_scale v_scale q_norm_weight k_norm_weight query_seqlens"
)
_UNSUPPORTED_INPUTS = _GROUP_QUERY_INPUTS.split()[10:]
"""Inputs of GroupQueryAttention that its body does not support."""


def _query_positions(op: Emitter, n: NodeView) -> tuple[ir.Value, ir.Value]:
    """Returns the positions of the queries of a GroupQueryAttention in its cache.

    Returns:
        The number of valid cached keys before the queries, int64 [batch, 1], and the position of each query among the
        keys, int64 [batch, queries]. Without a cache, both have a batch size of 1.
    """
    length = op.Squeeze(op.Shape(n.query, start=1, end=2), [0])
    # Shape inference doesn't know the length of a Range, but it knows that of this shape.
    order = op.Reshape(op.Range(0, length, 1), op.Concat([1], op.Shape(n.query, start=1, end=2), axis=0))
    if n.past_key is None:
        return op.const([[0]]), order
    last_valid = op.Reshape(op.Cast(n.seqlens_k, to=ir.DataType.INT64), [-1, 1])
    # On the first call there is no valid cache, and sequences shorter than `length` (padded at the end) would give
    # negative counts.
    before = op.Max(op.Sub(op.Add(last_valid, 1), length), op.const([[0]]))
    return before, op.Add(before, order)


def _cache_order(op: Emitter, n: NodeView, before: ir.Value) -> ir.Value:
    """Returns, for each position of the new cache, the index of the key to store there, [batch, keys].

    Indices refer to the concatenation of the old cache and the new keys. The old cache may have free space after its
    valid keys. The new keys fill that space, so the order differs between sequences.

    Args:
        op: emitter.
        n: a GroupQueryAttention node.
        before: number of valid keys in the old cache, [batch, 1].
    """
    past, new = op.Shape(n.past_key, start=2, end=3), op.Shape(n.query, start=1, end=2)
    total = op.Max(past, op.Reshape(op.Cast(n.total_sequence_length, to=ir.DataType.INT64), [-1]))
    place = op.Unsqueeze(op.Range(0, op.Squeeze(total, [0]), 1), [0])
    since = op.Sub(place, before)
    is_new = op.And(op.GreaterOrEqual(since, 0), op.Less(since, new))
    last = op.Sub(op.Add(past, new), 1)
    return op.Where(is_new, op.Add(past, since), op.Min(place, last))


def _gather_in_order(op: Emitter, past: ir.Value, new: ir.Value, order: ir.Value) -> ir.Value:
    """Returns the new cache of keys or values, `[batch, heads, keys, size]`.

    Args:
        op: emitter.
        past: the old cache.
        new: the new keys or values.
        order: for each position, the index of the key or value to store there, [batch, keys]. Indices refer to the
            concatenation of `past` and `new`.
    """
    joined = op.Concat(past, new, axis=2)
    ends = op.Shape(joined, start=0, end=2), op.Shape(order, start=1, end=2), op.Shape(joined, start=3)
    places = op.Expand(op.Unsqueeze(order, [1, 3]), op.Concat(*ends, axis=0))
    result: ir.Value = op.GatherElements(joined, places, axis=2)
    return result


@defbody(
    "GroupQueryAttention", MS, _GROUP_QUERY_INPUTS, "output present_key present_value output_qk",
    causal=1, do_rotary=0, k_norm_epsilon=None, k_quant_type="NONE", kv_cache_bit_width=None, kv_num_heads=None,
    local_window_size=-1, num_heads=None, q_norm_epsilon=None, qk_norm_epsilon=1e-6, qk_output=0,
    rotary_interleaved=0, scale=None, sliding_window_cache=0, smooth_softmax=-1, softcap=None, v_quant_type="NONE",
)  # fmt: skip
def group_query_attention(op: Emitter, n: NodeView) -> list[ir.Value]:
    """Decomposes GroupQueryAttention: causal attention in which several query heads share one key/value head.

    New keys and values are written into the cache after the valid ones of each sequence. Shorter sequences are padded
    at the end, and the causal mask hides the padding from earlier queries.
    """
    unknown = [name for name in _UNSUPPORTED_INPUTS if getattr(n, name) is not None]
    if n.attr("smooth_softmax") in (1, True):
        unknown.append("smooth_softmax")
    if unknown:
        raise unsupported(n, f"attention with {' and '.join(unknown)}")
    heads, shared = n.attr("num_heads"), n.attr("kv_num_heads")
    before, places = _query_positions(op, n)
    features = (static_dims(n.query) or (None,))[-1]
    head_size = features // (heads if n.key is not None else heads + 2 * shared) if features else None
    # Without `key`, `query` contains packed queries, keys and values.
    if n.key is None:
        joint = op.Reshape(n.query, [0, 0, heads + 2 * shared, -1])
        q, k, v = op.Split(joint, [heads, shared, shared], axis=2, _outputs=3)
    else:
        q = op.Reshape(n.query, [0, 0, heads, -1])
        k, v = (op.Reshape(value, [0, 0, shared, -1]) for value in (n.key, n.value))
    if n.attr("do_rotary"):
        positions = places if n.position_ids is None else n.position_ids
        # The cosines have one column per pair of features.
        columns = (static_dims(n.cos_cache) or (None, None))[1]
        whole = columns is not None and head_size == 2 * columns
        q, k = (_rotate(op, n, x, positions, n.attr("rotary_interleaved"), whole=whole) for x in (q, k))
    k, v = (op.Transpose(x, perm=[0, 2, 1, 3]) for x in (k, v))
    if n.past_key is not None and n.past_value is not None:
        order = _cache_order(op, n, before)
        k, v = (_gather_in_order(op, past, x, order) for past, x in ((n.past_key, k), (n.past_value, v)))
    # This shape tells onnx's shape inference that batch and sequence are those of the queries. Otherwise, the sizes
    # after the mask would be unknown, and gradients of every later Add would be summed over axes found at run time.
    last = [-1] if head_size is None else [heads * head_size]
    shape = op.Concat(op.Shape(n.query, end=2), last, axis=0)
    if _is_plain(op, n) and head_size is not None:
        y = _causal_attention(
            op, op.Transpose(q, perm=[0, 2, 1, 3]), k, v, n.attr("scale") or head_size**-0.5, heads // shared
        )
        return [op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), shape), k, v]
    # A separate axis for the query heads of a group lets keys and values broadcast, without being repeated.
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
        hidden = _hidden_keys(op, scores, max(n.attr("local_window_size"), 0), op.Unsqueeze(places, [1, 2]))
        scores = op.Where(hidden, op.const(float(np.finfo(np.float32).min), like=scores), scores)
    y = op.MatMul(op.Softmax(scores, axis=-1), op.Unsqueeze(v, [2]))
    y = op.Reshape(op.Transpose(y, perm=[0, 3, 1, 2, 4]), shape)
    return [y, k, v]


def _is_plain(op: Emitter, n: NodeView) -> bool:
    """True if `op` can call composite ops, and n is causal float32 attention without a cache, a window or a softcap."""
    has_cache, is_float32 = n.past_key is not None, n.query.dtype == ir.DataType.FLOAT
    has_window = n.attr("local_window_size") > 0
    return bool(
        op.can_call and n.attr("causal") and is_float32 and not (has_cache or has_window or n.attr("softcap"))
    )


def _causal_attention(
    op: Emitter, q: ir.Value, k: ir.Value, v: ir.Value, scale: float, per_group: int
) -> ir.Value:
    """Computes causal attention with a composite op whose native kernel does not store the probabilities.

    Args:
        op: emitter.
        q: queries, `[batch, heads, sequence, size]`.
        k: keys, `[batch, heads / per_group, sequence, size]`.
        v: values, with the shape of `k`.
        scale: factor by which the scores are multiplied.
        per_group: number of query heads that share a key/value head.

    Returns:
        `[batch, heads, sequence, size]`.
    """
    if per_group > 1:
        # The composite op needs as many key heads as query heads. The copies are small compared to the scores.
        repeated = op.Concat(op.Shape(k, end=2), [per_group], op.Shape(k, start=2), axis=0)
        k, v = (op.Reshape(op.Expand(op.Unsqueeze(x, [2]), repeated), op.Shape(q)) for x in (k, v))
    y, _ = op.call(causal_attention, q, k, v, scale=scale, _outputs=2)
    return y
