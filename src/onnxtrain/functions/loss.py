"""Defines gradients of losses."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import Emitter

from ._composite import composite


@composite(
    "SoftmaxCrossEntropyGradient", ["log_prob", "labels", "scale"], dtypes={"labels": ir.DataType.INT64}
)
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
    columns = op.Unsqueeze(scale, [1])
    probabilities = op.Mul(op.Exp(log_prob), columns)
    # One subtraction per label. Comparing each label with all C classes would cost as much as the rest together.
    index = op.Unsqueeze(labels, [1])
    return op.ScatterElements(
        probabilities, index, op.Sub(op.GatherElements(probabilities, index, axis=1), columns), axis=1
    )
