"""Fits a temperature to validation data, measures calibration, and finds the best decision threshold."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np

from onnxtrain.runtime.dtypes import Array
from onnxtrain.trainer._metrics.probabilities import probabilities_of

ThresholdMetric = Literal["f1", "accuracy", "mcc"]
"""Metrics whose best threshold can be found."""

BINS = 15
"""Number of bins of the expected calibration error, as in Guo et al. 2017."""

LOWEST, HIGHEST = 0.01, 100.0
"""Bounds of the temperature. Without them, data without mistakes would lead to 0."""


class Sample(NamedTuple):
    """Scores and true classes of a dataset.

    Attributes:
        scores: float64 scores [n, classes], of which each row has one true class; or [n], of yes-or-no questions.
        truth: int64 [n], classes, or 0 and 1.
    """

    scores: Array
    truth: Array

    @property
    def of_classes(self) -> bool:
        """True if each row has one true class."""
        return self.scores.ndim == 2


def negative_log_likelihood(data: Sample, temperature: float = 1.0) -> float:
    """Returns the mean of -log p of the true classes, of scores divided by a temperature."""
    scaled = data.scores / temperature
    if not data.of_classes:
        # log(1 + exp(-m)) for the margin m of the true answer.
        return float(np.logaddexp(0, np.where(data.truth == 1, -scaled, scaled)).mean())
    highest = scaled.max(axis=1, keepdims=True)
    normalizer = np.log(np.exp(scaled - highest).sum(axis=1)) + highest[:, 0]
    return float((normalizer - _of_truth(scaled, data.truth)).mean())


def _of_truth(values: Array, truth: Array) -> Array:
    return np.asarray(np.take_along_axis(values, truth[:, None], axis=1)[:, 0])


def _slope(data: Sample, inverse: float) -> float:
    """Returns the derivative of the negative log-likelihood by the inverse of the temperature."""
    scaled = data.scores * inverse
    if not data.of_classes:
        chance = probabilities_of("sigmoid", scaled)
        assert chance is not None
        return float(((chance - data.truth) * data.scores).mean())
    chance = probabilities_of("softmax", scaled)
    assert chance is not None
    return float(((chance * data.scores).sum(axis=1) - _of_truth(data.scores, data.truth)).mean())


def fit_temperature(data: Sample) -> float:
    """Returns the temperature with the least negative log-likelihood (Guo et al. 2017), between the bounds.

    The loss is a convex function of the inverse of the temperature, as log-sum-exp of linear functions is convex. So
    its derivative has at most one zero, which bisection finds.
    """
    # In logarithms, so that the relative precision is the same everywhere.
    low, high = math.log(1 / HIGHEST), math.log(1 / LOWEST)
    if _slope(data, math.exp(high)) <= 0:
        low = high
    while high - low > 1e-10:
        middle = (low + high) / 2
        if _slope(data, math.exp(middle)) < 0:
            low = middle
        else:
            high = middle
    found = min(max(math.exp(-(low + high) / 2), LOWEST), HIGHEST)
    return min((1.0, found), key=lambda temperature: negative_log_likelihood(data, temperature))


def expected_calibration_error(data: Sample, temperature: float = 1.0) -> float:
    """Returns the expected calibration error of the predicted classes (Guo et al. 2017, equation 3).

    The predictions are sorted by confidence into 15 bins of equal width. The error is the mean over all predictions of
    the difference between accuracy and mean confidence of their bin.
    """
    scaled = data.scores / temperature
    if data.of_classes:
        chance = probabilities_of("softmax", scaled)
        assert chance is not None
        confidence, right = chance.max(axis=1), scaled.argmax(axis=1) == data.truth
    else:
        chance = probabilities_of("sigmoid", scaled)
        assert chance is not None
        confidence, right = np.maximum(chance, 1 - chance), (scaled > 0) == (data.truth == 1)
    # Bins are open on the left, as in the paper.
    bins = np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)
    gaps = np.bincount(bins, right - confidence, BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def best_cut(scores: Array, truth: Array, metric: ThresholdMetric) -> tuple[float, float, float]:
    """Finds the score above which predicting "yes" maximizes a metric.

    Args:
        scores: scores of "yes", float32 or float64 [n]; 0 stands for a probability of 0.5.
        truth: 0 or 1, [n].
        metric: the metric.

    Returns:
        The score, in the middle between those of two samples, or 0 if it is one of the best; the metric there; and the
        metric at 0.
    """
    kinds, places = np.unique(scores, return_inverse=True)
    # Of each distinct score, from the highest to the lowest: how many samples are right and wrong if it is a yes.
    yes = np.bincount(places, truth, len(kinds))[::-1]
    no = np.bincount(places, 1 - truth, len(kinds))[::-1]
    # The first entry stands for "never yes".
    right, wrong = (np.concatenate([[0], np.cumsum(count)]) for count in (yes, no))
    values = _metric(metric, right, wrong, right[-1], wrong[-1])
    falling = kinds[::-1]
    above = np.concatenate([[np.inf], falling])
    below = np.concatenate([falling, [-np.inf]])
    cuts = [_between(float(low), float(high), scores.dtype) for low, high in zip(below, above, strict=True)]
    best = np.flatnonzero(values >= values.max() * (1 - 1e-12))
    chosen = min(best, key=lambda index: abs(cuts[index]))
    # The entry of the cut 0, above which all scores are positive.
    at_zero = int((falling > 0).sum())
    return cuts[chosen], float(values[chosen]), float(values[at_zero])


def _between(low: float, high: float, dtype: np.dtype[np.floating]) -> float:
    """Returns a number that is at least `low` and less than `high`; 0 if it is one, else one in the middle."""
    if low <= 0 < high:
        return 0.0
    if math.isinf(high):
        return low
    if math.isinf(low):
        return float(np.nextafter(dtype.type(high), -dtype.type(np.inf)))
    middle = float(dtype.type((low + high) / 2))
    return middle if low <= middle < high else low


def _metric(name: ThresholdMetric, tp: Array, fp: Array, positives: float, negatives: float) -> Array:
    """Computes a metric from counts of true and false positives; like scikit-learn, 0 where it is 0/0."""
    fn, tn = positives - tp, negatives - fp
    if name == "accuracy":
        return np.asarray((tp + tn) / (positives + negatives))
    if name == "f1":
        above, below = 2 * tp, 2 * tp + fp + fn
    else:
        above = tp * tn - fp * fn
        below = np.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    return np.asarray(np.divide(above, below, out=np.zeros(len(tp)), where=below > 0))
