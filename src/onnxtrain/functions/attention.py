"""Defines attention and its gradient, neither of which stores the matrix of probabilities.

Shapes: q `[batch, heads, queries, size]`, k `[batch, heads, keys, size]`, v `[batch, heads, keys, value size]`. A mask
is added to the scores `[batch, heads, queries, keys]` and broadcasts to them. The second output is the log-sum-exp of
each query's scores, `[batch, heads, queries]`.

The backward pass recomputes the probabilities from the scores and the log-sum-exp: Dao et al., "FlashAttention: Fast
and Memory-Efficient Exact Attention with IO-Awareness" (2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain.emitter import AttributeRef, Emitter

from ._composite import CompositeOp, composite

_SCALE = {"scale": ir.AttributeType.FLOAT}
# The mask comes last, because only some of the ops have one.
_INPUTS = ["q", "k", "v"]
_GRADIENT_INPUTS = ["ct", "q", "k", "v", "log_sum"]
_INTS = ir.AttributeType.INTS
_Pair = tuple[ir.Value, ir.Value]
_Gradients = tuple[ir.Value, ir.Value, ir.Value]


@composite("Attention", _INPUTS, _SCALE, outputs=2)
def attention(op: Emitter, q: ir.Value, k: ir.Value, v: ir.Value, *, scale: AttributeRef) -> _Pair:
    """Computes softmax(scale q kᵀ) v; also returns the log-sum-exp of each query's scores, for the backward pass."""
    return _weighted_values(op, _scores(op, q, k, scale), v)


@composite("CausalAttention", _INPUTS, _SCALE, outputs=2)
def causal_attention(op: Emitter, q: ir.Value, k: ir.Value, v: ir.Value, *, scale: AttributeRef) -> _Pair:
    """Computes causal Attention: query i attends only to keys 0 .. i. Returns the same outputs as Attention."""
    return _weighted_values(op, _causal(op, _scores(op, q, k, scale)), v)


@composite("MaskedAttention", [*_INPUTS, "mask"], _SCALE, outputs=2)
def masked_attention(
    op: Emitter, q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value, *, scale: AttributeRef
) -> _Pair:
    """Computes softmax(scale q kᵀ + mask) v; NaN for fully masked queries (all -inf), as with Softmax.

    Returns:
        The result, and the log-sum-exp of each query's masked scores, for the backward pass.
    """
    return _weighted_values(op, op.Add(_scores(op, q, k, scale), mask), v)


@composite("SafeMaskedAttention", [*_INPUTS, "mask"], _SCALE, outputs=2)
def safe_masked_attention(
    op: Emitter, q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value, *, scale: AttributeRef
) -> _Pair:
    """Computes MaskedAttention, but with zero output and zero gradient for fully masked queries, as in PyTorch.

    Returns:
        The result, and the log-sum-exp of each query's masked scores: inf for fully masked queries.
    """
    scores = op.Add(_scores(op, q, k, scale), mask)
    nothing = op.Equal(_row_max(op, scores), -math.inf)
    mixed, log_sum = _weighted_values(op, op.Where(nothing, 0.0, scores), v)
    # A log-sum-exp of infinity makes the probabilities that the backward pass recomputes 0.
    return op.Where(nothing, 0.0, mixed), op.Where(op.Squeeze(nothing, [-1]), math.inf, log_sum)


@composite("AttentionGradient", _GRADIENT_INPUTS, _SCALE, outputs=3)
def attention_gradient(op: Emitter, *inputs: ir.Value, scale: AttributeRef) -> _Gradients:
    """VJP of Attention: cotangents of q, k and v.

    The inputs are ct, the cotangent of Attention's first output; q, k and v; and log_sum, its second output.
    """
    return _input_cotangents(op, inputs, scale, lambda scores: scores)


@composite("CausalAttentionGradient", _GRADIENT_INPUTS, _SCALE, outputs=3)
def causal_attention_gradient(op: Emitter, *inputs: ir.Value, scale: AttributeRef) -> _Gradients:
    """VJP of CausalAttention: cotangents of q, k and v. Its inputs are the same as for AttentionGradient."""
    return _input_cotangents(op, inputs, scale, lambda scores: _causal(op, scores))


@composite("MaskedAttentionGradient", [*_GRADIENT_INPUTS, "mask"], _SCALE, outputs=3)
def masked_attention_gradient(op: Emitter, *inputs: ir.Value, scale: AttributeRef) -> _Gradients:
    """VJP of MaskedAttention and SafeMaskedAttention: cotangents of q, k and v.

    The inputs are the same as for AttentionGradient, then the mask, which gets no cotangent.
    """
    *others, mask = inputs
    return _input_cotangents(op, others, scale, lambda scores: op.Add(scores, mask))


def _scores(op: Emitter, q: ir.Value, k: ir.Value, scale: AttributeRef) -> ir.Value:
    # Scaling q is cheaper than scaling the scores.
    return op.MatMul(op.Mul(q, op.number(scale, like=q)), _transpose(op, k))


def _causal(op: Emitter, scores: ir.Value) -> ir.Value:
    """Returns the scores with -inf for keys after the query's position."""
    shape = op.Shape(scores, start=2, end=4)
    # Sizes are read at run time, because one function serves calls of any shape.
    attended = op.Trilu(op.Expand(op.const(True), shape), upper=0)
    return op.Where(attended, scores, -math.inf)


def _weighted_values(op: Emitter, scores: ir.Value, v: ir.Value) -> _Pair:
    """Returns the values weighted by the softmax of the scores, and the log-sum-exp of the scores."""
    probabilities = op.Softmax(scores, axis=-1)
    # The largest probability is e⁰ / sum, which gives the sum without another pass of exponentials.
    log_sum = op.Sub(_row_max(op, scores), op.Log(_row_max(op, probabilities)))
    return op.MatMul(probabilities, v), op.Squeeze(log_sum, [-1])


def _row_max(op: Emitter, x: ir.Value) -> ir.Value:
    return op.ReduceMax(x, [-1], keepdims=1)


def _input_cotangents(
    op: Emitter, inputs: Sequence[ir.Value], scale: AttributeRef, masked: Callable[[ir.Value], ir.Value]
) -> _Gradients:
    """Returns the cotangents of q, k and v, using the VJPs of softmax and of two matrix products.

    Args:
        op: emitter of the function body.
        inputs: ct, q, k, v and the log-sum-exp of each query's scores.
        scale: factor by which q kᵀ is multiplied.
        masked: applies the mask to the scores.
    """
    ct, q, k, v, log_sum = inputs
    scores = masked(_scores(op, q, k, scale))
    probabilities = op.Exp(op.Sub(scores, op.Unsqueeze(log_sum, [-1])))
    # VJP of softmax, p * (g - sum(g * p)), with one product of the size of the scores.
    product = op.Mul(probabilities, op.MatMul(ct, _transpose(op, v)))
    total = op.ReduceSum(product, [-1], keepdims=1)
    ct_scores = op.Sub(product, op.Mul(probabilities, total))
    factor = op.number(scale, like=q)
    return (
        op.Mul(op.MatMul(ct_scores, k), factor),
        op.Mul(op.MatMul(_transpose(op, ct_scores), q), factor),
        op.MatMul(_transpose(op, probabilities), ct),
    )


def _transpose(op: Emitter, x: ir.Value) -> ir.Value:
    return op.Transpose(x, perm=[0, 1, 3, 2])


def _of_qkv(plain: CompositeOp) -> CompositeOp:
    """Registers the version of a forward op whose queries, keys and values are one tensor x."""
    attributes = {**_SCALE, "perm": _INTS, "y_perm": _INTS}

    def body(
        op: Emitter,
        x: ir.Value,
        *mask: ir.Value,
        scale: AttributeRef,
        perm: AttributeRef,
        y_perm: AttributeRef,
    ) -> _Pair:
        y, log_sum = plain.emit(op, *split_qkv(op, x, perm), *mask, scale=scale)
        return op.Transpose(y, perm=y_perm), log_sum

    body.__doc__ = f"""Computes {plain.name} of the queries, keys and values in one tensor x of five axes.

    The Transpose of x by `perm` is [3, batch, heads, positions, size]: queries, keys and values. The Transpose of the
    result by `y_perm` has the axes of x except the first that `perm` names, in the order of x.
    """
    return composite(f"Qkv{plain.name}", ["x", *plain.inputs[3:]], attributes, outputs=2)(body)


def _gradient_of_qkv(plain: CompositeOp) -> CompositeOp:
    """Registers the version of a gradient op whose queries, keys and values are one tensor x."""
    attributes = {**_SCALE, "perm": _INTS, "inverse": _INTS, "ct_perm": _INTS}

    def body(
        op: Emitter,
        ct: ir.Value,
        x: ir.Value,
        *others: ir.Value,
        scale: AttributeRef,
        perm: AttributeRef,
        inverse: AttributeRef,
        ct_perm: AttributeRef,
    ) -> ir.Value:
        parts = plain.emit(op, op.Transpose(ct, perm=ct_perm), *split_qkv(op, x, perm), *others, scale=scale)
        stacked = op.Concat(*(op.Unsqueeze(part, [0]) for part in parts), axis=0)
        return op.Transpose(stacked, perm=inverse)

    body.__doc__ = f"""Computes {plain.name} of queries, keys and values in one tensor x: the cotangent of x.

    The inputs are the cotangent of the first output, x, the second output, and the mask if there is one. The Transpose
    of x by `perm` is [3, batch, heads, positions, size], and `inverse` is the inverse permutation. The Transpose of the
    cotangent by `ct_perm` is [batch, heads, positions, size].
    """
    return composite(f"Qkv{plain.name}", ["ct", "x", *plain.inputs[4:]], attributes)(body)


def split_qkv(op: Emitter, x: ir.Value, perm: AttributeRef | Sequence[int]) -> list[ir.Value]:
    """Emits queries, keys and values of x, each `[batch, heads, positions, size]`.

    Args:
        op: emitter.
        x: queries, keys and values in one tensor.
        perm: permutation of the axes of x to `[3, batch, heads, positions, size]`.
    """
    parts = op.Split(op.Transpose(x, perm=perm), [1, 1, 1], axis=0, _outputs=3)
    return [op.Squeeze(part, [0]) for part in parts]


qkv_attention = _of_qkv(attention)
qkv_causal_attention = _of_qkv(causal_attention)
qkv_masked_attention = _of_qkv(masked_attention)
qkv_safe_masked_attention = _of_qkv(safe_masked_attention)
qkv_attention_gradient = _gradient_of_qkv(attention_gradient)
qkv_causal_attention_gradient = _gradient_of_qkv(causal_attention_gradient)
qkv_masked_attention_gradient = _gradient_of_qkv(masked_attention_gradient)
