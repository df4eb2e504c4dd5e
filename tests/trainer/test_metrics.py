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


@pytest.mark.parametrize("size", [200, 32, 7, 1])
def test_functions_are_of_the_whole_set(size: int) -> None:
    """F1 and the area under the curve are no means over batches."""

    def f1(prediction: np.ndarray, target: np.ndarray) -> float:
        return float(reference.f1_score(target == 1, prediction.argmax(axis=1) == 1))

    def auc(prediction: np.ndarray, target: np.ndarray) -> float:
        return float(reference.roc_auc_score(target == 1, prediction[:, 1]))

    problem = problems.classes(samples=200)
    trainer = Trainer(problem.model, problem.loss, learning_rate=0.0, metrics=["accuracy", f1, auc])
    prediction = trainer.predict(problem.x)
    expected = {
        "accuracy": reference.accuracy_score(problem.y, prediction.argmax(axis=1)),
        "f1": f1(prediction, problem.y),
        "auc": auc(prediction, problem.y),
    }
    scores = trainer.evaluate(problem.x, problem.y, batch_size=size)
    assert {name: scores[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    data = (problem.x, problem.y)
    history = trainer.fit(*data, batch_size=size, validation=data, verbose=False)
    for prefix in ("", "val_"):
        recorded = {name: history.last[prefix + name] for name in expected}
        assert recorded == pytest.approx(expected, rel=1e-5)
    assert list(history.last)[:5] == ["epoch", "loss", "accuracy", "f1", "auc"]


def test_function_that_gives_no_number() -> None:
    problem = problems.line()
    trainer = Trainer(problem.model, "mse", metrics=[lambda p, t: "good"])
    with pytest.raises(InputError, match="The metric '<lambda>' gave 'good'; it must give one number"):
        trainer.evaluate(problem.x, problem.y)


def test_named_metrics_do_not_broadcast() -> None:
    """Labels [n] against scores [n, 3], and a column [n, 1] against the argmax [n]."""
    problem = problems.classes()
    with pytest.raises(InputError, match=r"'mae' does not fit a prediction of shape \[32, 3\] and a target"):
        Trainer(problem.model, problem.loss, metrics=["mae"]).evaluate(problem.x, problem.y)
    line = problems.line()
    with pytest.raises(InputError, match="'accuracy' does not fit"):
        Trainer(line.model, "mse", metrics=["accuracy"]).evaluate(line.x, line.y)


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
