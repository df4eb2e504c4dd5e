"""Weights of classes and splits by class, beside PyTorch and scikit-learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.model_selection import train_test_split
from sklearn.utils.class_weight import compute_class_weight

from onnxtrain import Trainer
from onnxtrain.errors import InputError
from onnxtrain.losses import BCEWithLogitsLoss, CrossEntropyLoss
from onnxtrain.trainer.data import balanced_weights
from trainer import problems
from trainer.test_resume import InterruptAt
from trainer.test_sample_weight import torch_loss

functional = torch.nn.functional


def uneven(samples: int = 96) -> problems.Problem:
    """Labels 0, 1, 2 of which 0 is frequent, and some that do not count."""
    problem = problems.classes(samples=samples)
    labels = np.random.default_rng(3).choice(3, samples, p=[0.8, 0.12, 0.08])
    labels[::11] = -100
    return problems.Problem(problem.model, problem.loss, problem.x, labels)


@pytest.mark.parametrize("spec", ["balanced", {1: 4.0, 2: 0.5}, [1.0, 5.0, 0.25], np.array([0.0, 1.0, 2.0])])
@pytest.mark.parametrize("form", ["arrays", "frame", "set", "stream"])
def test_a_step_is_that_of_pytorch_with_class_weights(spec: Any, form: str) -> None:
    problem = uneven()
    counted = problem.y[problem.y >= 0]
    weights = {
        str: lambda: compute_class_weight("balanced", classes=np.arange(3), y=counted),
        dict: lambda: [1.0, 4.0, 0.5],
    }.get(type(spec), lambda: spec)()

    def twin(scores: Any, target: Any) -> Any:
        return functional.cross_entropy(scores, target, weight=torch.tensor(np.asarray(weights)))

    value, gradients = torch_loss(problem.model, twin, problem.x, problem.y)
    data: tuple[Any, ...] = (problem.x, problem.y)
    if form == "frame":
        data = (pd.DataFrame(problem.x), pd.Series(problem.y))
    elif form == "set":
        data = (torch.utils.data.TensorDataset(torch.tensor(problem.x), torch.tensor(problem.y)),)
    elif form == "stream":
        data = ([(problem.x[i : i + 32], problem.y[i : i + 32]) for i in range(0, 96, 32)],)
    trainer = Trainer(problem.model, "cross_entropy", "sgd", learning_rate=0.1)
    before = {name: p.data.copy() for name, p in trainer.parameters}
    options: dict[str, Any] = {"class_weight": spec, "accumulate": 3, "verbose": False}
    options |= {} if form == "stream" else {"batch_size": 32, "shuffle": False}
    if form == "stream" and isinstance(spec, str):
        with pytest.raises(
            InputError, match=r"class_weight='balanced' needs the labels of all samples before"
        ):
            trainer.fit(*data, **options)
        return
    history = trainer.fit(*data, **options)
    assert history.last["loss"] == pytest.approx(value, rel=1e-5)
    for name, parameter in trainer.parameters:
        np.testing.assert_allclose(parameter.data, before[name] - 0.1 * gradients[name], atol=2e-6)


def test_weights_of_classes_and_samples_are_multiplied() -> None:
    problem = uneven()
    weights = np.random.default_rng(0).integers(1, 4, len(problem.y)).astype(float)
    of_class = np.array([1.0, 3.0, 5.0])
    total = weights * np.where(problem.y < 0, 1.0, of_class[np.maximum(problem.y, 0)])
    trainers = [Trainer(problem.model, "cross_entropy", learning_rate=0.01) for _ in range(2)]
    trainers[0].fit(
        problem.x, problem.y, sample_weight=weights, class_weight=of_class, epochs=2, verbose=False
    )
    trainers[1].fit(problem.x, problem.y, sample_weight=total, epochs=2, verbose=False)
    assert trainers[0].history == trainers[1].history
    # Balanced weights count a sample of weight 2 as two.
    counted = problem.y >= 0
    copies = np.repeat(problem.y[counted], weights[counted].astype(int))
    expected = compute_class_weight("balanced", classes=np.arange(3), y=copies)
    np.testing.assert_allclose(balanced_weights(problem.y[counted], 3, weights[counted]), expected)


def test_yes_or_no_targets_have_two_classes_and_validation_has_no_weights() -> None:
    problem = problems.line()
    answers = (problem.y > np.quantile(problem.y, 0.75)).astype(np.float32)
    trainer = Trainer(problem.model, BCEWithLogitsLoss(), "sgd", learning_rate=0.0)
    validation = (problem.x, answers)
    trainer.fit(*validation, class_weight="balanced", validation=validation, batch_size=8, verbose=False)
    scores = torch.tensor(trainer.predict(problem.x)).double()
    terms = functional.binary_cross_entropy_with_logits(
        scores, torch.tensor(answers).double(), reduction="none"
    )
    flat = answers.reshape(-1).astype(int)
    weights = compute_class_weight("balanced", classes=np.arange(2), y=flat)[flat]
    expected = float((terms.numpy().reshape(-1) * weights).sum() / weights.sum())
    assert trainer.history.last["loss"] == pytest.approx(expected, rel=1e-5)
    assert trainer.history.last["val_loss"] == pytest.approx(float(terms.mean()), rel=1e-5)


def test_validation_without_weights_beside_weighted_samples() -> None:
    """The data to validate with is opened before the models take weights."""
    problem = problems.classes()
    weights = np.linspace(1, 2, 60)
    losses = []
    for validation in ((problem.x, problem.y), (problem.x, problem.y, np.ones(60))):
        trainer = Trainer(problem.model, "cross_entropy")
        trainer.fit(problem.x, problem.y, validation=validation, sample_weight=weights, verbose=False)
        losses.append(trainer.history["val_loss"])
    assert losses[0] == losses[1]


def test_class_weights_that_make_no_sense() -> None:
    problem = uneven()
    for spec, message in (
        ("auto", "must be 'balanced', a dict or an array, received 'auto'"),
        ({3: 1.0}, r"names the classes \[3\], but the classes are 0 to 2"),
        ({"rose": 1.0}, r"class indices as keys, received \['rose'\]"),
        ([1.0, 2.0], r"has shape \[2\]; pass one weight for each of the 3 classes"),
        ([1.0, 2.0, -1.0], r"finite and non-negative, received \[1.0, 2.0, -1.0\]"),
    ):
        with pytest.raises(InputError, match=message):
            Trainer(problem.model, "cross_entropy").fit(
                problem.x, problem.y, class_weight=spec, verbose=False
            )
    trainer = Trainer(problem.model, CrossEntropyLoss(probabilities=True))
    with pytest.raises(
        InputError, match=r"class_weight needs one class label per sample, but the model has the target"
    ):
        trainer.fit(
            problem.x, np.eye(3, dtype=np.float32)[problem.y % 3], class_weight="balanced", verbose=False
        )
    with pytest.raises(InputError, match="contains other values"):
        Trainer(problems.line().model, "mse").check_data(
            problems.line().x, problems.line().y, class_weight="balanced"
        )


def held_out_labels(trainer: Trainer, x: Any, *y: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels to train on and those to validate with, as the trainer splits them."""
    from onnxtrain.trainer._fit.datasets import Data, fit_datasets
    from onnxtrain.trainer.data import Pass

    training, held_out = fit_datasets(trainer._state, Data(x, *y, **options))
    assert held_out is not None
    parts = [np.concatenate([batch[1] for batch in source.read(Pass())]) for source in (training, held_out)]
    return parts[0], parts[1]


@pytest.mark.parametrize("form", ["arrays", "set"])
@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5])
def test_shares_of_classes_are_those_of_scikit_learn(fraction: float, form: str) -> None:
    x = np.random.default_rng(0).standard_normal((137, 4)).astype(np.float32)
    y = np.random.default_rng(5).permutation(np.repeat([0, 1, 2], [90, 36, 11]))
    count = round(137 * fraction)
    expected = np.bincount(train_test_split(y, test_size=count, stratify=y, random_state=0)[1])
    data: tuple[Any, ...] = (x, y)
    if form == "set":
        data = (torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y)),)
    splits = []
    for seed in (0, 1):
        trainer = Trainer(problems.classes().model, "cross_entropy", seed=seed)
        training, held_out = held_out_labels(trainer, *data, validation=fraction, stratify=True)
        np.testing.assert_array_equal(np.bincount(held_out), expected)
        np.testing.assert_array_equal(np.bincount(held_out) + np.bincount(training), [90, 36, 11])
        splits.append(training)
    assert not np.array_equal(splits[0], splits[1])


def test_splits_by_class_that_are_refused() -> None:
    problem = problems.classes()
    trainer = Trainer(problem.model, "cross_entropy")
    with pytest.raises(
        InputError, match=r"stratify=True splits off a fraction of each class, but validation is not given"
    ):
        trainer.fit(problem.x, problem.y, stratify=True, verbose=False)
    labels = np.zeros(60, int)
    labels[7] = 2
    with pytest.raises(InputError, match="2 classes, of which the rarest, 2, has 1 in all"):
        trainer.check_data(problem.x, labels, validation=0.5, stratify=True)
    with pytest.raises(InputError, match="cannot split 2 samples off 3 classes"):
        trainer.check_data(problem.x, np.arange(60) % 3, validation=2 / 60, stratify=True)


def test_an_interrupted_fit_resumes_with_the_same_weights_and_split(tmp_path: Path) -> None:
    problem = uneven()
    fit: dict[str, Any] = {"epochs": 3, "batch_size": 16, "validation": 0.25, "verbose": False}
    fit |= {"class_weight": "balanced", "stratify": True, "evaluate_every": 2}
    straight = Trainer(problem.model, "cross_entropy")
    straight.fit(problem.x, problem.y, **fit)
    assert [entry["step"] for entry in straight.history.evaluations] == [2, 4, 6, 8, 10, 12, 14]
    trainer = Trainer(problem.model, "cross_entropy", directory=tmp_path / "run")
    trainer.fit(problem.x, problem.y, callbacks=[InterruptAt(7)], **fit)
    resumed = Trainer.resume(tmp_path / "run")
    with pytest.raises(InputError, match=r"class_weight \[.*\], now None, stratify True, now False"):
        resumed.fit(problem.x, problem.y, **fit | {"class_weight": None, "stratify": False})
    resumed.fit(problem.x, problem.y, **fit)
    assert resumed.history == straight.history
