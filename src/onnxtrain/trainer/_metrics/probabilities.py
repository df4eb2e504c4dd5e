"""Converts a model's logits to class probabilities, with the activation that its loss implies."""

from __future__ import annotations

import numpy as np

from onnxtrain.losses import loss_class
from onnxtrain.runtime.dtypes import Array


def probabilities(loss: str, scores: Array, axis: int = 1) -> Array | None:
    """Converts logits to probabilities, float64 of the same shape; returns None if the loss does not define any.

    Args:
        loss: class name of the loss, e.g. "CrossEntropyLoss".
        scores: logits, float, e.g. [samples, classes].
        axis: class axis of the logits, for losses that compare classes.
    """
    return probabilities_of(loss_class(loss).activation, scores, axis)


def probabilities_of(activation: str | None, scores: Array, axis: int = 1) -> Array | None:
    """Applies an activation, "softmax", "sigmoid" or "exp", to logits; see :func:`probabilities`."""
    exact = scores.astype(np.float64)
    if activation == "sigmoid":
        # exp(-|x|) does not overflow.
        small = np.exp(-np.abs(exact))
        return np.where(exact >= 0, 1 / (1 + small), small / (1 + small))
    if activation == "softmax_last":
        activation, axis = "softmax", -1
    if activation == "exp":
        return np.asarray(np.exp(exact))
    if activation != "softmax" or scores.ndim < 2:
        return None
    # Numerically stable: exp overflows above 709.
    exponentials = np.exp(exact - exact.max(axis=axis, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=axis, keepdims=True))
