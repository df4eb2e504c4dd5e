"""Registers the VJPs of the composite attention ops.

Instead of the probabilities `[batch, heads, queries, keys]`, the forward ops save only `log_sum`, the log-sum-exp of
each query's scores, from which the backward pass recomputes the probabilities.
"""

from __future__ import annotations

from functools import partial

import onnx_ir as ir

from onnxtrain.autodiff._broadcast import sum_to_shape_of
from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import Cotangents
from onnxtrain.autodiff.rules._composite import composite_vjp
from onnxtrain.emitter import Emitter
from onnxtrain.functions import (
    CompositeOp,
    attention,
    attention_gradient,
    causal_attention,
    causal_attention_gradient,
    masked_attention,
    masked_attention_gradient,
    qkv_attention,
    qkv_attention_gradient,
    qkv_causal_attention,
    qkv_causal_attention_gradient,
    qkv_masked_attention,
    qkv_masked_attention_gradient,
    qkv_safe_masked_attention,
    safe_masked_attention,
    split_qkv,
)
from onnxtrain.passes import inverse_permutation


def _attention(gradient: CompositeOp, op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of composite attention: calls `gradient` for q, k and v, and emits standard ops for a learned mask."""
    # The mask's cotangent is as large as the scores, which the composite op never materializes.
    result: dict[str, ir.Value] = {}
    if any(map(n.needs, "qkv")):
        masks = n.inputs[3:]
        grads = op.call(gradient, ct, n.q, n.k, n.v, n.out.log_sum, *masks, scale=n.attr("scale"), _outputs=3)
        result = dict(zip("qkv", grads, strict=True))
    if n.inputs[3:] and n.needs("mask"):
        result["mask"] = _ct_mask(op, n, ct, n.q, n.k, n.v)
    return result


def _qkv_attention(gradient: CompositeOp, op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of composite attention whose queries, keys and values are one tensor."""
    result: dict[str, ir.Value] = {}
    perm, ct_perm = n.attr("perm"), inverse_permutation(n.attr("y_perm"))
    if n.needs("x"):
        attributes = {
            "scale": n.attr("scale"),
            "perm": perm,
            "inverse": inverse_permutation(perm),
            "ct_perm": ct_perm,
        }
        result["x"] = op.call(gradient, ct, n.x, n.out.log_sum, *n.inputs[1:], **attributes)
    if n.inputs[1:] and n.needs("mask"):
        q, k, v = split_qkv(op, n.x, perm)
        dims = None if n.x.shape is None else ir.Shape([n.x.shape[axis] for axis in perm[1:]])
        for part in (q, k, v):
            part.shape = dims
        result["mask"] = _ct_mask(op, n, op.Transpose(ct, perm=ct_perm), q, k, v)
    return result


def _ct_mask(op: Emitter, n: NodeView, ct: ir.Value, q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
    """Returns the cotangent of the mask: the scores' cotangent, summed over axes along which the mask was broadcast."""
    keys, values = (op.Transpose(x, perm=[0, 1, 3, 2]) for x in (k, v))
    # Recompute the probabilities: exp(score - log_sum) is the softmax, without another sum.
    scores = op.Add(op.MatMul(op.Mul(q, n.attr("scale")), keys), n.mask)
    probabilities = op.Exp(op.Sub(scores, op.Unsqueeze(n.out.log_sum, [-1])))
    product = op.Mul(probabilities, op.MatMul(ct, values))
    ct_scores = op.Sub(product, op.Mul(probabilities, op.ReduceSum(product, [-1], keepdims=1)))
    assert q.shape is not None
    assert k.shape is not None
    ct_scores.shape = ir.Shape([*q.shape[:3], k.shape[2]])
    return sum_to_shape_of(op, ct_scores, ct_scores, n.mask)


for _composite, _rule in (
    (attention, partial(_attention, attention_gradient)),
    (causal_attention, partial(_attention, causal_attention_gradient)),
    (masked_attention, partial(_attention, masked_attention_gradient)),
    (safe_masked_attention, partial(_attention, masked_attention_gradient)),
    (qkv_attention, partial(_qkv_attention, qkv_attention_gradient)),
    (qkv_causal_attention, partial(_qkv_attention, qkv_causal_attention_gradient)),
    (qkv_masked_attention, partial(_qkv_attention, qkv_masked_attention_gradient)),
    (qkv_safe_masked_attention, partial(_qkv_attention, qkv_masked_attention_gradient)),
):
    composite_vjp(_composite, ("y", "log_sum"), saves=("log_sum",))(_rule)
