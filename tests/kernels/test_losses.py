"""Kernels of losses beside their bodies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kernels.against_body import check, needs_kernels, run

pytestmark = needs_kernels


@pytest.mark.parametrize(
    "shape", [[1, 1], [5, 3], [64, 1000], [3, 5, 1], [2, 4, 17], [2, 3, 5, 7], [0, 3]], ids=str
)
def test_cross_entropy_gradient(shape: Sequence[int]) -> None:
    rng = np.random.default_rng(2)
    logits = rng.standard_normal(shape)
    log_prob = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    positions = (shape[0], *shape[2:])
    labels = rng.integers(-shape[1], shape[1], positions)  # from the back, too
    scale = rng.standard_normal(positions) * (rng.random(positions) < 0.8)
    check("SoftmaxCrossEntropyGradient", {"log_prob": log_prob, "labels": labels, "scale": scale})


@pytest.mark.parametrize("label", [3, -4])
def test_labels_beyond_the_classes_are_refused(label: int) -> None:
    labels = np.zeros(20000, np.int64)
    labels[-1] = label
    inputs = {"log_prob": np.zeros((20000, 3)), "labels": labels, "scale": np.ones(20000)}
    with pytest.raises(Exception, match="a label is not one of the classes"):
        run("SoftmaxCrossEntropyGradient", inputs, {}, native=True)
