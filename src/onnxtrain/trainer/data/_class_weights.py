"""Weighs the classes of labels, so that frequent classes do not outweigh rare ones."""

from __future__ import annotations

import numpy as np

from onnxtrain.runtime.dtypes import Array


def balanced_weights(labels: Array, classes: int, sample_weight: Array | None = None) -> Array:
    """Computes the weight n / (k * n_c) of each class c, as scikit-learn's `compute_class_weight("balanced", ...)`.

    n is the number of samples, n_c that of class c, k the number of classes that occur. With sample weights n and n_c
    are sums of weights, so that a sample of weight 2 counts as two. Classes that do not occur have the weight 1.

    Args:
        labels: integers in 0 .. classes - 1, [samples].
        classes: number of classes.
        sample_weight: a weight for each sample, [samples]; None for weights of 1.

    >>> balanced_weights(np.array([0, 0, 0, 1]), 3).round(2)
    array([0.67, 2.  , 1.  ])
    """
    counts = np.bincount(labels, sample_weight, classes)
    occurs = counts > 0
    # 1 in place of 0 only avoids the warning of a division that `where` discards.
    weights = counts.sum() / (np.count_nonzero(occurs) * np.where(occurs, counts, 1))
    return np.where(occurs, weights, 1.0)
