"""MixUp and CutMix beside the code of their authors, written down with PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from onnxtrain import Trainer
from onnxtrain.errors import InputError
from onnxtrain.losses import CrossEntropyLoss
from onnxtrain.trainer import CutMix, MixUp
from trainer import problems

LABELS = np.arange(12) % 3


def batch() -> Any:
    return np.random.default_rng(0).standard_normal((12, 2, 9, 7)).astype(np.float32)


@pytest.mark.parametrize("seed", range(5))
def test_mixup_is_that_of_its_authors(seed: int) -> None:
    mixed, targets = MixUp(0.7, classes=3)(batch(), LABELS, np.random.default_rng(seed))
    # facebookresearch/mixup-cifar10, `mixup_data` and `mixup_criterion`.
    rng = np.random.default_rng(seed)
    lam, index = rng.beta(0.7, 0.7), torch.tensor(rng.permutation(12))
    x, y = torch.tensor(batch()), torch.tensor(LABELS)
    np.testing.assert_allclose(mixed, lam * x + (1 - lam) * x[index], rtol=1e-5, atol=1e-6)
    scores = torch.tensor(np.random.default_rng(9).standard_normal((12, 3)))
    criterion = torch.nn.functional.cross_entropy
    expected = lam * criterion(scores, y) + (1 - lam) * criterion(scores, y[index])
    assert float(criterion(scores, torch.tensor(targets).double())) == pytest.approx(
        float(expected), rel=1e-6
    )


@pytest.mark.parametrize("seed", range(8))
def test_cutmix_is_that_of_its_authors(seed: int) -> None:
    given = batch()
    mixed, targets = CutMix(classes=3)(given, LABELS, np.random.default_rng(seed))
    np.testing.assert_array_equal(given, batch())
    # clovaai/CutMix-PyTorch, `rand_bbox` and the loop of `train`, whose axes are called W and H.
    rng = np.random.default_rng(seed)
    lam, index = rng.beta(1.0, 1.0), rng.permutation(12)
    rng.random()
    width, height = given.shape[2:]
    ratio = np.sqrt(1.0 - lam)
    cut_w, cut_h = int(width * ratio), int(height * ratio)
    cx, cy = rng.integers(width), rng.integers(height)
    x1, x2 = np.clip(cx - cut_w // 2, 0, width), np.clip(cx + cut_w // 2, 0, width)
    y1, y2 = np.clip(cy - cut_h // 2, 0, height), np.clip(cy + cut_h // 2, 0, height)
    expected = torch.tensor(batch())
    expected[:, :, x1:x2, y1:y2] = torch.tensor(batch())[index][:, :, x1:x2, y1:y2]
    lam = 1 - ((x2 - x1) * (y2 - y1) / (width * height))
    np.testing.assert_array_equal(mixed, expected)
    np.testing.assert_allclose(
        targets, lam * np.eye(3)[LABELS] + (1 - lam) * np.eye(3)[LABELS[index]], rtol=1e-6
    )


def test_shares_and_partners_are_drawn_as_they_should() -> None:
    rng = np.random.default_rng(0)
    x = np.array([[0.0], [1.0]])
    drawn = [MixUp(0.4)(x, x, rng) for _ in range(4000)]
    for mixed, targets in drawn:
        np.testing.assert_array_equal(mixed, targets)
    # Where the pair was exchanged, the first sample is 1 - l.
    exchanged = np.array([mixed[0, 0] for mixed, _ in drawn if mixed[0, 0] not in (0.0,)])
    assert 0.45 < len(exchanged) / 4000 < 0.55
    assert scipy.stats.kstest(exchanged, scipy.stats.beta(0.4, 0.4).cdf).pvalue > 1e-3
    kept = [MixUp(0.4, probability=0.25)(x, x, rng)[0] is x for _ in range(4000)]
    assert 0.72 < np.mean(kept) < 0.78


def test_a_fit_learns_from_mixed_batches_and_judges_whole_ones() -> None:
    problem = problems.images(samples=60)
    y = np.eye(3, dtype=np.float32)[problem.y]
    results = []
    for transform in (None, MixUp(0.3), CutMix()):
        trainer = Trainer(problem.model, CrossEntropyLoss(probabilities=True), learning_rate=0.03)
        trainer.fit(problem.x, y, epochs=25, transform=transform, validation=(problem.x, y), verbose=False)
        results.append(trainer.history.last)
        assert trainer.history.last["val_accuracy"] > 0.8
    # The entropy of mixed targets cannot be learned away.
    assert results[0]["loss"] < min(results[1]["loss"], results[2]["loss"])
    trainer = Trainer(problem.model, CrossEntropyLoss(probabilities=True))
    pixels = (problem.x * 20).clip(0, 255).astype(np.uint8)
    trainer.fit(pixels, problem.y, transform=MixUp(classes=3), verbose=False)


def test_what_cannot_be_mixed_is_refused() -> None:
    for alpha in (0, -1, float("nan"), "0.2", True):
        with pytest.raises(InputError, match="MixUp: alpha must be a positive number"):
            MixUp(alpha)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="CutMix: probability must be a number between 0 and 1"):
        CutMix(probability=1.5)
    rng = np.random.default_rng(0)
    with pytest.raises(InputError, match=r"needs floating-point targets, e\.g\. one-hot, or one class label"):
        MixUp()(batch(), LABELS, rng)
    with pytest.raises(InputError, match="labels 0 to 2, classes=2"):
        MixUp(classes=2)(batch(), LABELS, rng)
    with pytest.raises(InputError, match=r"CutMix needs images of shape \[batch, ..., height, width\]"):
        CutMix(classes=3)(np.ones((12, 4)), LABELS, rng)
    with pytest.raises(InputError, match="supports only models with one input, received left, right"):
        MixUp(classes=3)({"left": 1, "right": 2}, LABELS, rng)
