"""Differentiates the classification losses.

Class weights have no gradient, as in PyTorch: differentiating with respect to them raises NoGradientRule.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import Cotangents, vjp
from onnxtrain.autodiff.rules._count import counting_dtype
from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.functions import (
    log_softmax_gradient,
    mean_cross_entropy_gradient,
    softmax_cross_entropy_gradient,
)


@vjp("SoftmaxCrossEntropyLoss", wrt=("scores",), outputs=("output", "log_prob"), saves=("log_prob",))
def softmax_cross_entropy_loss(
    op: Emitter, n: NodeView, cts: tuple[ir.Value | None, ir.Value | None]
) -> Cotangents:
    """VJP of SoftmaxCrossEntropyLoss: scale * (softmax - onehot(label)), plus LogSoftmax's VJP for log_prob.

    `scale` is the cotangent of each label's loss, -log p: weight[label] * ct, divided by the sum of the weights of all
    labels if reduction="mean". It is 0 for ignored labels.
    """
    ct, ct_log_prob = cts
    log_prob = n.out.log_prob
    # ORTModule chooses the number of threads of the backward session by the sizes of its values.
    if log_prob.shape is None:
        log_prob.shape = n.scores.shape
    parts = []
    if ct is not None:
        ignored = n.attr("ignore_index")
        # The function counts labels in the dtype of `ct`; float16 represents integers only up to 2048.
        counts = ct.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
        if n.attr("reduction") == "mean" and n.weights is None and ignored is not None and counts:
            labels = _as_int64(op, n.labels)
            parts.append(op.call(mean_cross_entropy_gradient, log_prob, labels, ct, ignore_index=ignored))
        else:
            labels, scale = _labels_and_scale(op, n, ct, n.labels, n.weights)
            parts.append(op.call(softmax_cross_entropy_gradient, log_prob, labels, scale))
    if ct_log_prob is not None:
        parts.append(op.call(log_softmax_gradient, log_prob, ct_log_prob, axis=1))
    return parts[0] if len(parts) == 1 else op.Add(*parts)


@vjp("NegativeLogLikelihoodLoss", wrt=("input",))
def negative_log_likelihood_loss(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of NegativeLogLikelihoodLoss: -scale * onehot(label).

    `scale` is the cotangent of each label's loss, -log p: weight[label] * ct, divided by the sum of the weights of all
    labels if reduction="mean". It is 0 for ignored labels.
    """
    labels, scale = _labels_and_scale(op, n, ct, n.target, n.weight)
    places, updates = op.Unsqueeze(labels, [1]), op.Unsqueeze(op.Neg(scale), [1])
    return op.ScatterElements(op.zeros_like(n.input), places, updates, axis=1)


def _labels_and_scale(
    op: Emitter, n: NodeView, ct: ir.Value, labels: ir.Value, weights: ir.Value | None
) -> tuple[ir.Value, ir.Value]:
    """Returns the labels as int64, with ignored ones set to 0, and `scale`, the cotangent of each label's -log p.

    `scale` has the shape of the labels. It is weight[label] * ct; with reduction="mean", it is divided by the sum of
    the weights of all labels. Ignored labels have weight 0; without class weights, all others have weight 1.
    """
    labels = _as_int64(op, labels)
    valid, ignored = None, n.attr("ignore_index")
    shape = op.shape_of(labels)
    if ignored is not None:
        # An ignored label such as -100 is not a valid index for Gather and Scatter; setting its scale to zero isn't
        # enough.
        valid = op.Not(op.Equal(labels, ignored))
        labels = op.Where(valid, labels, 0)
    weight = op.Gather(weights, labels) if weights is not None else None
    if n.attr("reduction") == "mean":
        ct = op.Mul(ct, _inverse_total_weight(op, ct, labels, valid, weight))
    scale = op.Mul(ct, weight) if weight is not None else ct
    if valid is not None:
        scale = op.Where(valid, scale, 0.0)
    # Expands a scalar cotangent; a mask or class weights have already broadcast it to the labels.
    elif weight is None and n.attr("reduction") != "none":
        scale = op.Expand(scale, shape)
    return labels, scale


def _as_int64(op: Emitter, labels: ir.Value) -> ir.Value:
    """Casts the labels to int64."""
    return op.Cast(labels, to=ir.DataType.INT64) if labels.dtype != ir.DataType.INT64 else labels


def _inverse_total_weight(
    op: Emitter, ct: ir.Value, labels: ir.Value, valid: ir.Value | None, weight: ir.Value | None
) -> ir.Value | float:
    """Returns 1 / (sum of `weight` over all `valid` labels), in the dtype of `ct`.

    If `weight` is None, all weights are 1. If `valid` is None, all labels are valid.
    """
    # float16 represents integers only up to 2048.
    wide = counting_dtype(ct)
    if valid is None and weight is None:
        dims = static_dims(labels)
        if dims is not None and None not in dims:
            return 1 / max(math.prod(size for size in dims if size is not None), 1)
        total = op.Cast(op.Size(labels), to=wide)
    else:
        counted = op.Cast(valid if weight is None else weight, to=wide)
        if valid is not None and weight is not None:
            counted = op.Where(valid, counted, 0.0)
        total = op.ReduceSum(counted, keepdims=0)
    return op.Cast(op.Reciprocal(total), to=ct.dtype)
