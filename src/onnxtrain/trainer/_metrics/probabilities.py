"""Computes class probabilities from the scores that a model returns, by the activation that belongs to its loss."""

from __future__ import annotations

import numpy as np

from onnxtrain.losses import loss_class
from onnxtrain.runtime.dtypes import Array


def probabilities(loss: str, scores: Array, axis: int = 1) -> Array | None:
    """Computes probabilities from the scores of a loss, float64 of their shape; None if the loss has none.

    Args:
        loss: class name of the loss, e.g. "CrossEntropyLoss".
        scores: float, e.g. [samples, classes].
        axis: axis of the scores along which the classes lie, for losses that compare classes.
    """
    exact = scores.astype(np.float64)
    activation = loss_class(loss).activation
    if activation == "sigmoid":
        # exp(-|x|) is at most 1 for both signs of x and does not overflow.
        small = np.exp(-np.abs(exact))
        return np.where(exact >= 0, 1 / (1 + small), small / (1 + small))
    if activation == "exp":
        return np.asarray(np.exp(exact))
    if activation != "softmax" or scores.ndim < 2:
        return None
    # Without the maximum exp overflows for scores from 710 on.
    exponentials = np.exp(exact - exact.max(axis=axis, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=axis, keepdims=True))
