"""Defines the mean negative log-likelihood, and gradients of cross entropy."""

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
    """VJP of cross entropy: scale * (exp(log_prob) - onehot(labels)).

    Args:
        op: emitter of the function body.
        log_prob: float [N, C, d1, ..., dk].
        labels: int64 [N, d1, ..., dk] with values in [0, C).
        scale: float [N, d1, ..., dk]: cotangent of each label's loss; 0 for ignored labels.
    """
    return _gradient(op, log_prob, op.Unsqueeze(labels, [1]), op.Unsqueeze(scale, [1]))


@composite("MeanCrossEntropyGradient", ["log_prob", "labels", "ct"], _IGNORE_INDEX, dtypes=_LABELS)
def mean_cross_entropy_gradient(
    op: Emitter, log_prob: ir.Value, labels: ir.Value, ct: ir.Value, *, ignore_index: AttributeRef
) -> ir.Value:
    """VJP of mean cross entropy: ct / n * (exp(log_prob) - onehot(labels)), and 0 for ignored labels.

    Args:
        op: emitter of the function body.
        log_prob: float [N, C, d1, ..., dk].
        labels: int64 [N, d1, ..., dk]; n of them are in [0, C), the others are `ignore_index`.
        ct: float []: cotangent of the mean.
        ignore_index: label to ignore, e.g. -100.
    """
    is_valid, index = _non_ignored(op, labels, ignore_index)
    share = op.Mul(ct, op.Reciprocal(_count(op, is_valid, log_prob)))
    return _gradient(op, log_prob, index, op.Where(is_valid, share, 0.0))


@composite("MeanNegativeLogLikelihood", ["log_prob", "labels"], _IGNORE_INDEX, dtypes=_LABELS)
def mean_negative_log_likelihood(
    op: Emitter, log_prob: ir.Value, labels: ir.Value, *, ignore_index: AttributeRef
) -> ir.Value:
    """Returns the mean of -log_prob at the non-ignored labels; NaN if all labels are ignored.

    Args:
        op: emitter of the function body.
        log_prob: float [N, C, d1, ..., dk].
        labels: int64 [N, d1, ..., dk] with values in [0, C), or `ignore_index`.
        ignore_index: label to ignore, e.g. -100.
    """
    is_valid, index = _non_ignored(op, labels, ignore_index)
    chosen = op.Where(is_valid, op.GatherElements(log_prob, index, axis=1), 0.0)
    # Accumulated in float64, because ONNX Runtime adds float32 numbers one by one. The float32 count of labels is exact
    # all the same, up to 10^8.
    wide = op.Cast(chosen, to=ir.DataType.DOUBLE)
    mark_long_sum(wide)
    total = op.Cast(op.ReduceSum(wide, keepdims=0), to=log_prob.dtype)
    return op.Neg(op.Div(total, _count(op, is_valid, log_prob)))


def _non_ignored(op: Emitter, labels: ir.Value, ignore_index: AttributeRef) -> tuple[ir.Value, ir.Value]:
    """Returns a mask of the non-ignored labels, and the labels with ignored ones set to 0, both [N, 1, d1, ..., dk]."""
    index = op.Unsqueeze(labels, [1])
    is_valid = op.Not(op.Equal(index, op.ints(ignore_index)))
    # An ignored label such as -100 is not a valid index for Gather and Scatter.
    return is_valid, op.Where(is_valid, index, 0)


def _count(op: Emitter, is_valid: ir.Value, like: ir.Value) -> ir.Value:
    """Returns the number of true elements as a scalar with the dtype of `like`."""
    return op.ReduceSum(op.Cast(is_valid, to=like.dtype), keepdims=0)


def _gradient(op: Emitter, log_prob: ir.Value, index: ir.Value, scale: ir.Value) -> ir.Value:
    """Returns scale * (exp(log_prob) - onehot(index)); index and scale are [N, 1, d1, ..., dk]."""
    probabilities = op.Mul(op.Exp(log_prob), scale)
    # One subtraction per label: comparing each label with all C classes would cost as much as everything else.
    return op.ScatterElements(
        probabilities, index, op.Sub(op.GatherElements(probabilities, index, axis=1), scale), axis=1
    )
