"""Defines the mean loss of class labels, and gradients of losses."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import AttributeRef, Emitter
from onnxtrain.passes import mark_long_sum

from ._composite import composite

_LABELS = {"labels": ir.DataType.INT64}
_IGNORE_INDEX = {"ignore_index": ir.AttributeType.INT}


@composite("SoftmaxCrossEntropyGradient", ["log_prob", "labels", "scale"], dtypes=_LABELS)
def softmax_cross_entropy_gradient(
    op: Emitter, log_prob: ir.Value, labels: ir.Value, scale: ir.Value
) -> ir.Value:
    """Differentiates cross entropy: scale * (exp(log_prob) - onehot(labels)).

    Args:
        op: emitter of the function body.
        log_prob: float [N, C, d1, ..., dk].
        labels: int64 [N, d1, ..., dk] with values in [0, C).
        scale: float [N, d1, ..., dk]: cotangent of the loss of each label; 0 for ignored labels.
    """
    return _gradient(op, log_prob, op.Unsqueeze(labels, [1]), op.Unsqueeze(scale, [1]))


@composite("MeanCrossEntropyGradient", ["log_prob", "labels", "ct"], _IGNORE_INDEX, dtypes=_LABELS)
def mean_cross_entropy_gradient(
    op: Emitter, log_prob: ir.Value, labels: ir.Value, ct: ir.Value, *, ignore_index: AttributeRef
) -> ir.Value:
    """Differentiates the mean of the cross entropy: ct / n * (exp(log_prob) - onehot(labels)), 0 for ignored labels.

    Args:
        op: emitter of the function body.
        log_prob: float [N, C, d1, ..., dk].
        labels: int64 [N, d1, ..., dk]; n of them are in [0, C), the others are `ignore_index`.
        ct: float []: cotangent of the mean.
        ignore_index: label of positions that do not count, e.g. -100.
    """
    counts, index = _counted(op, labels, ignore_index)
    share = op.Mul(ct, op.Reciprocal(_number(op, counts, log_prob)))
    return _gradient(op, log_prob, index, op.Where(counts, share, 0.0))


@composite("MeanNegativeLogLikelihood", ["log_prob", "labels"], _IGNORE_INDEX, dtypes=_LABELS)
def mean_negative_log_likelihood(
    op: Emitter, log_prob: ir.Value, labels: ir.Value, *, ignore_index: AttributeRef
) -> ir.Value:
    """Averages -log_prob at the labels, over those that are not `ignore_index`; NaN if all are.

    Args:
        op: emitter of the function body.
        log_prob: float [N, C, d1, ..., dk].
        labels: int64 [N, d1, ..., dk] with values in [0, C), or `ignore_index`.
        ignore_index: label of positions that do not count, e.g. -100.
    """
    counts, index = _counted(op, labels, ignore_index)
    chosen = op.Where(counts, op.GatherElements(log_prob, index, axis=1), 0.0)
    # ONNX Runtime adds float32 numbers one by one, of which a count of up to 10^8 is exact all the same.
    wide = op.Cast(chosen, to=ir.DataType.DOUBLE)
    mark_long_sum(wide)
    total = op.Cast(op.ReduceSum(wide, keepdims=0), to=log_prob.dtype)
    return op.Neg(op.Div(total, _number(op, counts, log_prob)))


def _counted(op: Emitter, labels: ir.Value, ignore_index: AttributeRef) -> tuple[ir.Value, ir.Value]:
    """Returns which labels count, and the labels with 0 for those that do not, both [N, 1, d1, ..., dk]."""
    index = op.Unsqueeze(labels, [1])
    counts = op.Not(op.Equal(index, op.ints(ignore_index)))
    # An ignored label such as -100 is no class: no Gather or Scatter may see it.
    return counts, op.Where(counts, index, 0)


def _number(op: Emitter, counts: ir.Value, like: ir.Value) -> ir.Value:
    """Returns how many are true, as a scalar of the dtype of `like`."""
    return op.ReduceSum(op.Cast(counts, to=like.dtype), keepdims=0)


def _gradient(op: Emitter, log_prob: ir.Value, index: ir.Value, scale: ir.Value) -> ir.Value:
    """Returns scale * (exp(log_prob) - onehot(index)); index and scale are [N, 1, d1, ..., dk]."""
    probabilities = op.Mul(op.Exp(log_prob), scale)
    # One subtraction per label. Comparing each label with all C classes would cost as much as the rest together.
    return op.ScatterElements(
        probabilities, index, op.Sub(op.GatherElements(probabilities, index, axis=1), scale), axis=1
    )
