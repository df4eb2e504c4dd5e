"""Kernels of losses beside their bodies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kernels.against_body import check, needs_kernels, run

pytestmark = needs_kernels


SHAPES = [[1, 1], [5, 3], [64, 1000], [3, 5, 1], [2, 4, 17], [2, 3, 5, 7], [0, 3]]
IGNORED = -100
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def log_probabilities(shape: Sequence[int]) -> tuple[np.random.Generator, np.ndarray, np.ndarray]:
    """Returns a generator, log-probabilities and labels."""
    rng = np.random.default_rng(2)
    logits = rng.standard_normal(shape)
    labels = rng.integers(-shape[1], shape[1], (shape[0], *shape[2:]))  # from the back, too
    return rng, logits - np.log(np.exp(logits).sum(1, keepdims=True)), labels


@each_shape
def test_cross_entropy_gradient(shape: Sequence[int]) -> None:
    rng, log_prob, labels = log_probabilities(shape)
    scale = rng.standard_normal(labels.shape) * (rng.random(labels.shape) < 0.8)
    check("SoftmaxCrossEntropyGradient", {"log_prob": log_prob, "labels": labels, "scale": scale})


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@each_shape
def test_mean(shape: Sequence[int], share: float) -> None:
    """The mean and its gradient; a share of the labels is ignored."""
    rng, log_prob, labels = log_probabilities(shape)
    labels = np.where(rng.random(labels.shape) < share, IGNORED, labels)
    inputs, attributes = {"log_prob": log_prob, "labels": labels}, {"ignore_index": IGNORED}
    with np.errstate(divide="ignore", invalid="ignore"):
        check("MeanCrossEntropyGradient", {**inputs, "ct": np.array(-1.7)}, attributes)
        check("MeanNegativeLogLikelihood", inputs, attributes)


def test_an_ignored_label_may_be_a_class() -> None:
    log_prob = np.log(np.array([[0.25, 0.75], [0.5, 0.5]]))
    labels = np.array([1, 0])
    (loss,) = run(
        "MeanNegativeLogLikelihood",
        {"log_prob": log_prob, "labels": labels},
        {"ignore_index": 1},
        native=True,
    )
    assert loss == pytest.approx(np.log(2))


@pytest.mark.parametrize("label", [3, -4])
def test_labels_beyond_the_classes_are_refused(label: int) -> None:
    labels = np.zeros(20000, np.int64)
    labels[-1] = label
    inputs = {"log_prob": np.zeros((20000, 3)), "labels": labels, "scale": np.ones(20000)}
    with pytest.raises(Exception, match="a label is not one of the classes"):
        run("SoftmaxCrossEntropyGradient", inputs, {}, native=True)
    mean = {key: value for key, value in inputs.items() if key != "scale"}
    with pytest.raises(Exception, match="a label is not one of the classes"):
        run("MeanNegativeLogLikelihood", mean, {"ignore_index": IGNORED}, native=True)
    with pytest.raises(Exception, match="a label is not one of the classes"):
        run("MeanCrossEntropyGradient", {**mean, "ct": np.ones(())}, {"ignore_index": IGNORED}, native=True)
