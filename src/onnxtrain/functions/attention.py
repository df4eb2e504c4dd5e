"""Attention and its gradient, without probabilities that outlive the op.

q: `[batch, heads, queries, size]`; k: `[batch, heads, keys, size]`; v: `[batch, heads, keys, value size]`. A mask is
added to the scores, whose axes `[batch, heads, queries, keys]` it has, or axes that broadcast to these. The second
result is the logarithm of what the exponentials of each query's scores add up to, `[batch, heads, queries]`.

Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness" (2022): the gradient computes
the probabilities again, from the scores and these logarithms.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.emitter import AttributeRef, Emitter

from ._composite import composite

_SCALE = {"scale": ir.AttributeType.FLOAT}
_GIVEN = ["q", "k", "v"]
_GIVEN_BACK = ["ct", "q", "k", "v", "log_sum"]
_Pair = tuple[ir.Value, ir.Value]
_Gradients = tuple[ir.Value, ir.Value, ir.Value]


@composite("Attention", _GIVEN, _SCALE, outputs=2)
def attention(op: Emitter, q: ir.Value, k: ir.Value, v: ir.Value, *, scale: AttributeRef) -> _Pair:
    """softmax(scale q kᵀ) v."""
    return _mixed(op, _scores(op, q, k, scale), v)


@composite("CausalAttention", _GIVEN, _SCALE, outputs=2)
def causal_attention(op: Emitter, q: ir.Value, k: ir.Value, v: ir.Value, *, scale: AttributeRef) -> _Pair:
    """Attention of each query to the keys up to its own place."""
    return _mixed(op, _causal(op, _scores(op, q, k, scale)), v)


@composite("MaskedAttention", [*_GIVEN, "mask"], _SCALE, outputs=2)
def masked_attention(
    op: Emitter, q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value, *, scale: AttributeRef
) -> _Pair:
    """softmax(scale q kᵀ + mask) v; a query that may attend to nothing gives NaN, as Softmax does."""
    return _mixed(op, op.Add(_scores(op, q, k, scale), mask), v)


@composite("SafeMaskedAttention", [*_GIVEN, "mask"], _SCALE, outputs=2)
def safe_masked_attention(
    op: Emitter, q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value, *, scale: AttributeRef
) -> _Pair:
    """MaskedAttention, but a query that may attend to nothing gives zeros, and no gradients, as in PyTorch."""
    scores = op.Add(_scores(op, q, k, scale), mask)
    nothing = op.Equal(_most(op, scores), -math.inf)
    mixed, log_sum = _mixed(op, op.Where(nothing, 0.0, scores), v)
    return op.Where(nothing, 0.0, mixed), op.Where(op.Squeeze(nothing, [-1]), math.inf, log_sum)


@composite("AttentionGradient", _GIVEN_BACK, _SCALE, outputs=3)
def attention_gradient(
    op: Emitter,
    ct: ir.Value,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    log_sum: ir.Value,
    *,
    scale: AttributeRef,
) -> _Gradients:
    """Attention, with respect to q, k and v."""
    return _pulled_back(op, ct, q, k, v, _scores(op, q, k, scale), log_sum, scale)


@composite("CausalAttentionGradient", _GIVEN_BACK, _SCALE, outputs=3)
def causal_attention_gradient(
    op: Emitter,
    ct: ir.Value,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    log_sum: ir.Value,
    *,
    scale: AttributeRef,
) -> _Gradients:
    """CausalAttention, with respect to q, k and v."""
    return _pulled_back(op, ct, q, k, v, _causal(op, _scores(op, q, k, scale)), log_sum, scale)


@composite("MaskedAttentionGradient", [*_GIVEN_BACK, "mask"], _SCALE, outputs=3)
def masked_attention_gradient(
    op: Emitter,
    ct: ir.Value,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    log_sum: ir.Value,
    mask: ir.Value,
    *,
    scale: AttributeRef,
) -> _Gradients:
    """MaskedAttention and SafeMaskedAttention, with respect to q, k and v."""
    return _pulled_back(op, ct, q, k, v, op.Add(_scores(op, q, k, scale), mask), log_sum, scale)


def _scores(op: Emitter, q: ir.Value, k: ir.Value, scale: AttributeRef) -> ir.Value:
    return op.MatMul(op.Mul(q, op.number(scale, like=q)), _swapped(op, k))


def _causal(op: Emitter, scores: ir.Value) -> ir.Value:
    """Scores that are minus infinity for keys behind the place of the query."""
    shape = op.Shape(scores, start=2, end=4)
    attended = op.Trilu(op.Expand(op.const(True), shape), upper=0)
    return op.Where(attended, scores, -math.inf)


def _mixed(op: Emitter, scores: ir.Value, v: ir.Value) -> _Pair:
    """Values in the proportions of the exponentials, and the logarithms of the sums of these.

    The largest probability is e⁰ / sum, so that the sum needs no further pass of exponentials.
    """
    probabilities = op.Softmax(scores, axis=-1)
    log_sum = op.Sub(_most(op, scores), op.Log(_most(op, probabilities)))
    return op.MatMul(probabilities, v), op.Squeeze(log_sum, [-1])


def _most(op: Emitter, x: ir.Value) -> ir.Value:
    return op.ReduceMax(x, [-1], keepdims=1)


def _pulled_back(
    op: Emitter,
    ct: ir.Value,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    scores: ir.Value,
    log_sum: ir.Value,
    scale: AttributeRef,
) -> _Gradients:
    probabilities = op.Exp(op.Sub(scores, op.Unsqueeze(log_sum, [-1])))
    product = op.Mul(probabilities, op.MatMul(ct, _swapped(op, v)))
    total = op.ReduceSum(product, [-1], keepdims=1)
    ct_scores = op.Sub(product, op.Mul(probabilities, total))
    factor = op.number(scale, like=q)
    return (
        op.Mul(op.MatMul(ct_scores, k), factor),
        op.Mul(op.MatMul(_swapped(op, ct_scores), q), factor),
        op.MatMul(_swapped(op, probabilities), ct),
    )


def _swapped(op: Emitter, x: ir.Value) -> ir.Value:
    return op.Transpose(x, perm=[0, 1, 3, 2])
