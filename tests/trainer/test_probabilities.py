"""Probabilities of classes against PyTorch's, computed from the scores that the model gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import models
from onnxtrain import Trainer
from onnxtrain.errors import InputError
from onnxtrain.losses import CrossEntropyLoss
from trainer import problems


@pytest.mark.parametrize(
    ("loss", "twin"),
    [
        ("cross_entropy", lambda s: torch.softmax(s, 1)),
        (CrossEntropyLoss(probabilities=True), lambda s: torch.softmax(s, 1)),
        ("nll", torch.exp),
        ("bce_with_logits", torch.sigmoid),
        ("focal", torch.sigmoid),
    ],
)
def test_probabilities_are_those_of_pytorch(loss: Any, twin: Any) -> None:
    problem = problems.classes(samples=40)
    # Scores of which exp overflows in float32, and in float64 for the loss of log-probabilities alone.
    scale = 1.0 if loss == "nll" else 400.0
    trainer = Trainer(problem.model, loss)
    x = problem.x * scale
    result = trainer.predict_proba(x, batch_size=7)
    expected = twin(torch.tensor(trainer.predict(x)).double()).numpy()
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-30)


def test_classes_along_the_last_axis() -> None:
    nodes = models.parse_nodes("logits = MatMul(x, w)")
    w = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    model = models.make_model(nodes, {"x": ["n", "t", 4]}, {"logits": ["n", "t", 3]}, {"w": w})
    x = np.random.default_rng(1).standard_normal((6, 3, 4)).astype(np.float32)
    result = Trainer(model, CrossEntropyLoss(axis=-1)).predict_proba(x)
    np.testing.assert_allclose(result, torch.softmax(torch.tensor(x @ w), -1), rtol=1e-5)
    # Targets that are probabilities do not tell the axis.
    with pytest.raises(InputError, match=r"loss \(CrossEntropyLoss\) does not define how to compute them"):
        Trainer(model, CrossEntropyLoss(axis=-1, probabilities=True)).predict_proba(x)


def test_one_output_of_several_and_losses_without_probabilities() -> None:
    trainer = Trainer(problems.two_inputs(), "bce_with_logits", loss_input_names="product")
    inputs = {"left": np.ones((2, 2), np.float32), "right": np.ones((2, 3), np.float32)}
    expected = torch.sigmoid(torch.tensor(trainer.predict(inputs)["product"]))
    np.testing.assert_allclose(trainer.predict_proba(inputs), expected, rtol=1e-6)
    with pytest.raises(
        InputError, match=r"Predicting probabilities: the loss \(MSELoss\) does not define how"
    ):
        Trainer(problems.line().model, "mse").predict_proba(problems.line().x)
