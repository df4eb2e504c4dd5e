"""Metrics against scikit-learn, whatever the batch size."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as reference

from onnxtrain import Trainer
from onnxtrain.errors import InputError
from onnxtrain.trainer import METRICS
from trainer import problems


@pytest.mark.parametrize("size", [40, 7])
def test_regression(size: int) -> None:
    problem = problems.line()
    trainer = Trainer(problem.model, "mse", metrics=["mae", "mse", "rmse"])
    prediction = trainer.predict(problem.x)
    scores = trainer.evaluate(problem.x, problem.y, batch_size=size)
    assert scores["mae"] == pytest.approx(reference.mean_absolute_error(problem.y, prediction), rel=1e-6)
    assert scores["mse"] == pytest.approx(reference.mean_squared_error(problem.y, prediction), rel=1e-6)
    assert scores["rmse"] == pytest.approx(reference.root_mean_squared_error(problem.y, prediction), rel=1e-6)
    assert scores["loss"] == pytest.approx(scores["mse"], rel=1e-5)


def test_binary_labels() -> None:
    problem = problems.line()
    target = (problem.y > 0).astype(np.float32)
    trainer = Trainer(problem.model, "bce_with_logits")
    expected = reference.accuracy_score(target, trainer.predict(problem.x) > 0)
    assert trainer.evaluate(problem.x, target, batch_size=7)["accuracy"] == pytest.approx(expected)


def test_function_is_averaged_by_sample() -> None:
    def largest(prediction: np.ndarray, target: np.ndarray) -> float:
        return float(np.abs(prediction - target).max())

    problem = problems.line(samples=10)
    trainer = Trainer(problem.model, "mse", metrics=[largest])
    error = np.abs(trainer.predict(problem.x) - problem.y)
    expected = (8 * error[:8].max() + 2 * error[8:].max()) / 10
    assert trainer.evaluate(problem.x, problem.y, batch_size=8)["largest"] == pytest.approx(expected)


def test_loss_of_the_model_itself_has_no_metrics() -> None:
    """A model whose only output is its loss."""
    from onnx import helper

    import models

    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("Mul", ["y", "y"], ["squares"]),
        helper.make_node("ReduceMean", ["squares"], ["loss"], keepdims=0),
    ]
    model = models.make_model(nodes, {"x": ["n", 2]}, {"loss": []}, {"w": np.ones((2, 1), np.float32)})
    x = np.random.default_rng(0).standard_normal((8, 2))
    trainer = Trainer(model, loss=None, learning_rate=0.1)
    history = trainer.fit(x, epochs=20, verbose=False)
    assert history.keys() == ["epoch", "loss", "learning_rate"]
    assert history["loss"][-1] < history["loss"][0]
    with pytest.raises(InputError, match="computes its loss from its inputs alone"):
        trainer.fit(x, x, verbose=False)
    with pytest.raises(InputError, match="metrics need a target"):
        Trainer(model, loss=None, metrics=["mae"])


def test_table_of_metrics() -> None:
    assert {name: metric.higher_is_better for name, metric in METRICS.items()} == {
        "accuracy": True,
        "probability_accuracy": True,
        "binary_accuracy": True,
        "mae": False,
        "mse": False,
        "rmse": False,
    }
