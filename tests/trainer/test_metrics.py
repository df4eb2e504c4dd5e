"""Metrics against scikit-learn, whatever the batch size."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper
from scipy.special import softmax
from sklearn import metrics as reference

import models
from onnxtrain import EarlyStopping, Trainer
from onnxtrain.errors import InputError, MissingPackageError
from onnxtrain.losses import CrossEntropyLoss
from onnxtrain.runtime.manifest import ClassLabels, InputSpec
from onnxtrain.trainer._metrics.metrics import Averages, make_metrics
from onnxtrain.trainer._metrics.whole_set import Task
from trainer import problems


@pytest.mark.parametrize("size", [40, 7])
def test_errors_of_regression_match_scikit_learn(size: int) -> None:
    problem = problems.line()
    trainer = Trainer(problem.model, "mse", metrics=["mae", "mse", "rmse"])
    prediction = trainer.predict(problem.x)
    scores = trainer.evaluate(problem.x, problem.y, batch_size=size)
    assert scores["mae"] == pytest.approx(reference.mean_absolute_error(problem.y, prediction), rel=1e-6)
    assert scores["mse"] == pytest.approx(reference.mean_squared_error(problem.y, prediction), rel=1e-6)
    assert scores["rmse"] == pytest.approx(reference.root_mean_squared_error(problem.y, prediction), rel=1e-6)
    assert scores["loss"] == pytest.approx(scores["mse"], rel=1e-5)


def test_accuracy_of_binary_labels_matches_scikit_learn() -> None:
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
    with pytest.raises(InputError, match="The metric '<lambda>' returned 'good'; it must return one number"):
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


AVERAGES = ("", "_macro", "_micro", "_weighted")


def rates(truth: np.ndarray, guess: np.ndarray, default: str) -> dict[str, float]:
    functions = {
        "f1": reference.f1_score,
        "precision": reference.precision_score,
        "recall": reference.recall_score,
    }
    return {
        name + suffix: function(truth, guess, average=suffix[1:] or default)
        for name, function in functions.items()
        for suffix in AVERAGES
    }


def linear(outputs: int, samples: int = 150, axis: int = 0) -> tuple[onnx.ModelProto, np.ndarray]:
    """x [n, 4] -> x w [n, outputs], or with an axis of positions [n, 4, axis] -> [n, outputs, axis]."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((4, outputs)).astype(np.float32)
    if not axis:
        nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
        model = models.make_model(nodes, {"x": ["n", 4]}, {"y": ["n", outputs]}, {"w": w})
        return model, rng.standard_normal((samples, 4)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["w", "x"], ["y"])]
    shapes = {"x": ["n", 4, axis]}, {"y": ["n", outputs, axis]}
    model = models.make_model(nodes, *shapes, {"w": np.ascontiguousarray(w.T)})
    return model, rng.standard_normal((samples, 4, axis)).astype(np.float32)


def compare(
    trainer: Trainer, x: np.ndarray, y: np.ndarray, expected: dict[str, float], rel: float = 1e-9
) -> None:
    """Over the whole set, whatever the batches, in `evaluate` and in what is recorded.

    `rel` is for what changes with the predictions' last digits, which depend on the batch size.
    """
    for size in (len(x), 11):
        scores = trainer.evaluate(x, y, batch_size=size)
        assert {name: scores[name] for name in expected} == pytest.approx(expected, rel=rel)
    trainer.learning_rate = 0.0
    history = trainer.fit(x, y, batch_size=32, validation=(x, y), verbose=False)
    for prefix in ("", "val_"):
        recorded = {name: history.last[prefix + name] for name in expected}
        assert recorded == pytest.approx(expected, rel=rel)


NAMES = [name + suffix for name in ("f1", "precision", "recall") for suffix in AVERAGES]


@pytest.mark.parametrize("axis", [0, 5], ids=["samples", "positions"])
@pytest.mark.parametrize("ignored", [False, True])
def test_scores_of_many_classes_match_scikit_learn(ignored: bool, axis: int) -> None:
    model, x = linear(7, axis=axis)
    rng = np.random.default_rng(1)
    trainer = Trainer(
        model, "cross_entropy", metrics=[*NAMES, "auroc", "top_k_accuracy", "top2_accuracy", "accuracy"]
    )
    prediction = trainer.predict(x)
    y = np.where(rng.random((len(x), axis)[: 1 + bool(axis)]) < 0.6, prediction.argmax(axis=1), 3)
    y = np.where(rng.random(y.shape) < 0.4, rng.integers(0, 7, y.shape), y)
    if ignored:
        y = np.where(rng.random(y.shape) < 0.3, -100, y)
    rows = np.moveaxis(prediction, 1, -1).reshape(-1, 7)[y.ravel() != -100]
    truth = y.ravel()[y.ravel() != -100]
    exponentials = np.exp(rows.astype(np.float64))
    expected = rates(truth, rows.argmax(axis=1), "macro") | {
        "auroc": reference.roc_auc_score(
            truth, exponentials / exponentials.sum(axis=1, keepdims=True), multi_class="ovr"
        ),
        "top_k_accuracy": reference.top_k_accuracy_score(truth, rows, k=5, labels=range(7)),
        "top2_accuracy": reference.top_k_accuracy_score(truth, rows, k=2, labels=range(7)),
        "accuracy": reference.accuracy_score(truth, rows.argmax(axis=1)),
    }
    assert 0.2 < expected["f1"] < expected["top_k_accuracy"] < 1
    compare(trainer, x, y, expected)
    matrix = reference.confusion_matrix(truth, rows.argmax(axis=1), labels=range(7))
    np.testing.assert_array_equal(trainer.confusion_matrix(x, y, batch_size=32), matrix)


def test_scores_of_two_classes_match_scikit_learn() -> None:
    model, x = linear(2)
    trainer = Trainer(model, "cross_entropy", metrics=[*NAMES, "auroc", "top1_accuracy"])
    prediction = trainer.predict(x).astype(np.float64)
    guess = prediction.argmax(axis=1)
    y = np.where(np.random.default_rng(1).random(len(x)) < 0.3, 1 - guess, guess)
    expected = rates(y, guess, "binary") | {
        "auroc": reference.roc_auc_score(y, prediction[:, 1] - prediction[:, 0]),
        "top1_accuracy": reference.accuracy_score(y, guess),
    }
    compare(trainer, x, y, expected)


def of_class(truth: np.ndarray, guess: np.ndarray, positive: int) -> dict[str, float]:
    """F1, precision and recall of one class, by scikit-learn."""
    return {
        name: getattr(reference, f"{name}_score")(
            truth == positive, guess == positive, average="binary", zero_division=0
        )
        for name in ("f1", "precision", "recall")
    }


@pytest.mark.parametrize(("classes", "positive"), [(2, 0), (2, 1), (5, 3)])
def test_positive_says_which_class(classes: int, positive: int, tmp_path: Path) -> None:
    model, x = linear(classes)
    metrics = ["f1", "precision", "recall", "f1_macro", "auroc"]
    trainer = Trainer(model, "cross_entropy", metrics=metrics, positive=positive, directory=tmp_path)
    prediction = trainer.predict(x).astype(np.float64)
    guess = prediction.argmax(axis=1)
    rng = np.random.default_rng(1)
    y = np.where(rng.random(len(x)) < 0.3, rng.integers(0, classes, len(x)), guess)
    softmax = np.exp(prediction) / np.exp(prediction).sum(axis=1, keepdims=True)
    expected = of_class(y, guess, positive) | {
        "f1_macro": reference.f1_score(y, guess, average="macro"),
        "auroc": reference.roc_auc_score(y == positive, softmax[:, positive]),
    }
    compare(trainer, x, y, expected)
    assert abs(expected["f1"] - reference.f1_score(y, guess, average="macro")) > 1e-3
    trainer.save(tmp_path)
    assert Trainer.resume(tmp_path).evaluate(x, y)["f1"] == pytest.approx(expected["f1"])


def test_positive_of_yes_and_no() -> None:
    model, x = linear(1)
    trainer = Trainer(model, "bce_with_logits", metrics=["f1", "recall"], positive=0)
    prediction = trainer.predict(x)
    y = ((prediction > 0.3) ^ (np.random.default_rng(1).random(prediction.shape) < 0.3)).astype(np.float32)
    expected = of_class(y.ravel().astype(int), (prediction > 0).ravel().astype(int), 0)
    compare(trainer, x, y, {name: expected[name] for name in ("f1", "recall")})


@pytest.mark.parametrize(
    ("positive", "message"),
    [
        (2, r"positive is 2, but the classes are 0 to 1"),
        (-1, "positive is -1"),
        ("fraud", "positive is 'fraud'"),
        (True, "positive is True"),
    ],
)
def test_positive_must_be_a_class(positive: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Trainer(linear(2)[0], "cross_entropy", metrics=["f1"], positive=positive)
    several = Trainer(linear(3)[0], "bce_with_logits", metrics=["f1"], positive=1)
    with pytest.raises(InputError, match="needs one correct class per sample"):
        several.evaluate(linear(3)[1], np.zeros((len(linear(3)[1]), 3), np.float32))


@pytest.mark.parametrize("outputs", [1, 3], ids=["binary", "several labels"])
def test_logits_of_yes_and_no(outputs: int) -> None:
    model, x = linear(outputs)
    trainer = Trainer(model, "bce_with_logits", metrics=[*NAMES, "auroc"])
    prediction = trainer.predict(x)
    flip = np.random.default_rng(1).random(prediction.shape) < [0.3, 0.1, 0.4][:outputs]
    y = ((prediction > 0.3) ^ flip).astype(np.float32)
    one = outputs == 1
    truth, guess, scores = ((a.ravel() if one else a) for a in (y, prediction > 0, prediction))
    expected = rates(truth, guess, "binary" if one else "macro")
    compare(trainer, x, y, expected | {"auroc": reference.roc_auc_score(truth, scores)})
    if one:
        matrix = reference.confusion_matrix(truth, guess)
        np.testing.assert_array_equal(trainer.confusion_matrix(x, y), matrix)
    else:
        with pytest.raises(InputError, match="A confusion matrix needs one correct class per sample"):
            trainer.confusion_matrix(x, y)


def test_class_probabilities_as_target() -> None:
    model, x = linear(4)
    trainer = Trainer(model, CrossEntropyLoss(probabilities=True), metrics=["f1", "auroc"])
    y = np.random.default_rng(1).dirichlet(np.ones(4), len(x)).astype(np.float32)
    prediction = trainer.predict(x).astype(np.float64)
    softmax = np.exp(prediction) / np.exp(prediction).sum(axis=1, keepdims=True)
    truth = y.argmax(axis=1)
    expected = {
        "f1": reference.f1_score(truth, prediction.argmax(axis=1), average="macro"),
        "auroc": reference.roc_auc_score(truth, softmax, multi_class="ovr"),
    }
    compare(trainer, x, y, expected)


def test_scores_that_are_probabilities() -> None:
    """A softmax in the model, and a loss of negative logarithms."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((4, 3)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Softmax", ["z"], ["y"], axis=1)]
    model = models.make_model(nodes, {"x": ["n", 4]}, {"y": ["n", 3]}, {"w": w})
    x, y = rng.standard_normal((90, 4)).astype(np.float32), rng.integers(0, 3, 90)
    trainer = Trainer(model, "cross_entropy", metrics=["auroc"])
    prediction = trainer.predict(x).astype(np.float64)
    rows = prediction / prediction.sum(axis=1, keepdims=True)
    assert trainer.evaluate(x, y)["auroc"] == pytest.approx(
        reference.roc_auc_score(y, rows, multi_class="ovr"), rel=1e-9
    )


@pytest.mark.parametrize("outputs", [1, 3])
def test_r2_matches_scikit_learn(outputs: int) -> None:
    model, x = linear(outputs)
    trainer = Trainer(model, "mse", metrics=["r2"])
    prediction = trainer.predict(x)
    y = prediction + np.random.default_rng(1).standard_normal(prediction.shape).astype(np.float32)
    compare(trainer, x, y, {"r2": reference.r2_score(y.astype(float), prediction.astype(float))}, rel=1e-6)
    assert np.isnan(trainer.evaluate(x[:1], y[:1])["r2"])


def test_perplexity_is_the_exponential_of_the_cross_entropy() -> None:
    model, x = linear(3)
    y = np.random.default_rng(1).integers(0, 3, len(x))
    trainer = Trainer(model, "cross_entropy", metrics=["perplexity"])
    prediction = trainer.predict(x).astype(np.float64)
    softmax = np.exp(prediction) / np.exp(prediction).sum(axis=1, keepdims=True)
    scores = trainer.evaluate(x, y, batch_size=7)
    assert scores["perplexity"] == pytest.approx(np.exp(reference.log_loss(y, softmax)), rel=1e-6)
    assert scores["perplexity"] == math.exp(scores["loss"])
    with pytest.raises(InputError, match="exponential of a mean cross-entropy; the loss is MSELoss"):
        Trainer(problems.line().model, "mse", metrics=["perplexity"])
    with pytest.raises(InputError, match="of a mean loss, but this loss is a sum"):
        Trainer(model, CrossEntropyLoss(reduction="sum"), metrics=["perplexity"])


def test_callbacks_know_what_is_better() -> None:
    model, x = linear(3)
    y = np.random.default_rng(1).integers(0, 3, len(x))
    trainer = Trainer(model, "cross_entropy", learning_rate=0.3, metrics=["f1", "perplexity"])
    stop = EarlyStopping("val_f1", patience=50, restore_best=True)
    history = trainer.fit(x, y, epochs=6, validation=(x, y), callbacks=[stop], verbose=False)
    assert min(history["val_f1"]) < max(history["val_f1"])
    assert trainer.evaluate(x, y)["f1"] == max(history["val_f1"])
    stop = EarlyStopping("val_perplexity", patience=50, restore_best=True)
    history = trainer.fit(x, y, epochs=6, validation=(x, y), callbacks=[stop], verbose=False)
    assert trainer.evaluate(x, y)["perplexity"] == pytest.approx(min(history["val_perplexity"][6:]), rel=1e-6)


def judged(name: str, prediction: np.ndarray, target: np.ndarray, task: Task, size: int = 8) -> float:
    """Returns a metric of a data set in batches, of which the last is smaller."""
    metrics, averages = make_metrics([name], task), Averages()
    spec = task.target
    assert spec is not None
    for begin in range(0, len(target), size):
        averages.add_metrics(metrics, prediction[begin : begin + size], target[begin : begin + size], spec)
    (value,) = averages.values(metrics).values()
    return value


def of_labels(classes: int) -> Task:
    target = InputSpec("labels", np.dtype(np.int64), ("n",), ClassLabels(classes, -100))
    return Task(target, "CrossEntropyLoss")


def of_numbers(columns: int, loss: str) -> Task:
    return Task(InputSpec("target", np.dtype(np.float32), ("n", columns)), loss)


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["float32", "float16", "bfloat16"]
)
@pytest.mark.parametrize("classes", [2, 4])
def test_ties_and_narrow_dtypes_match_scikit_learn(classes: int, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    scores = np.round(rng.standard_normal((41, classes))).astype(dtype)
    labels = rng.integers(0, classes, 41)
    labels[::6] = -100
    truth, wide = labels[labels >= 0], scores[labels >= 0].astype(np.float64)
    guess, average = wide.argmax(axis=1), "binary" if classes == 2 else "macro"
    one = wide[:, 1] - wide[:, 0]
    shares = softmax(wide, axis=1)
    expected = {
        "accuracy": reference.accuracy_score(truth, guess),
        "f1": reference.f1_score(truth, guess, average=average),
        "auroc": reference.roc_auc_score(truth, one)
        if classes == 2
        else reference.roc_auc_score(truth, shares, multi_class="ovr"),
        "top1_accuracy": reference.top_k_accuracy_score(
            truth, one if classes == 2 else wide, k=1, labels=np.arange(classes)
        ),
    }
    if classes > 2:
        expected["top2_accuracy"] = reference.top_k_accuracy_score(
            truth, wide, k=2, labels=np.arange(classes)
        )
    for name, value in expected.items():
        for size in (41, 8, 1):
            assert judged(name, scores, labels, of_labels(classes), size) == pytest.approx(
                value, rel=1e-12
            ), name


@pytest.mark.parametrize("classes", [2, 4])
def test_infinite_scores_have_an_order(classes: int) -> None:
    """scikit-learn refuses infinity; large finite numbers in the same places have the same order."""
    rng = np.random.default_rng(0)
    scores, labels = rng.standard_normal((40, classes)).astype(np.float32), rng.integers(0, classes, 40)
    infinite, large = scores.copy(), scores.copy()
    for row, column, sign in ((3, 1, 1), (9, 1, -1)):
        infinite[row, column], large[row, column] = sign * np.inf, sign * 80.0
    for name in ("accuracy", "f1", "auroc", "top1_accuracy", *(["top2_accuracy"] if classes > 2 else [])):
        task = of_labels(classes)
        assert judged(name, infinite, labels, task) == pytest.approx(judged(name, large, labels, task)), name
    answers = (labels > 0).astype(np.float32)[:, None]
    task = of_numbers(1, "BCEWithLogitsLoss")
    for name in ("binary_accuracy", "f1", "auroc"):
        pair = (judged(name, some[:, 1:2], answers, task) for some in (infinite, large))
        assert next(pair) == pytest.approx(next(pair)), name
    assert judged("r2", infinite[:, 1:2], answers, of_numbers(1, "MSELoss")) == -math.inf


@pytest.mark.parametrize(
    ("names", "columns", "loss"),
    [
        (
            "accuracy f1 precision_micro recall_weighted auroc top1_accuracy top2_accuracy",
            4,
            "CrossEntropyLoss",
        ),
        ("accuracy f1 auroc", 2, "CrossEntropyLoss"),
        ("binary_accuracy f1 auroc", 1, "BCEWithLogitsLoss"),
        ("binary_accuracy f1 auroc", 3, "BCEWithLogitsLoss"),
        ("mae mse rmse r2", 2, "MSELoss"),
    ],
)
def test_predictions_of_nan_make_metrics_nan(
    names: str, columns: int, loss: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No class follows from NaN: argmax and comparisons would silently count it as a right or wrong one."""
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((20, columns)).astype(np.float32)
    if loss == "CrossEntropyLoss":
        task, target = of_labels(columns), rng.integers(0, columns, 20)
    else:
        task, target = of_numbers(columns, loss), rng.integers(0, 2, scores.shape).astype(np.float32)
    broken = scores.copy()
    broken[5, columns - 1] = np.nan
    for name in names.split():
        caplog.clear()
        assert not math.isnan(judged(name, scores, target, task))
        assert not caplog.records
        assert math.isnan(judged(name, broken, target, task))
        assert "The model predicts NaN for some samples, so" in caplog.text
    if loss == "CrossEntropyLoss":
        target[5] = -100
        assert not any(math.isnan(judged(name, broken, target, task)) for name in names.split()[:4])


def test_nothing_to_judge_is_nan() -> None:
    model, x = linear(3)
    trainer = Trainer(model, "cross_entropy", metrics=["f1", "auroc", "top2_accuracy"])
    scores = trainer.evaluate(x, np.full(len(x), -100))
    assert all(np.isnan(value) for value in scores.values())
    one_class = trainer.evaluate(x, np.ones(len(x), np.int64))
    assert np.isnan(one_class["auroc"])
    assert 0 < one_class["f1"] < 1


@pytest.mark.parametrize(
    ("loss", "metric", "message"),
    [
        (
            "cross_entropy",
            "top_k_accuracy",
            "which needs more than 5 classes; there are 3. Choose a smaller one",
        ),
        ("cross_entropy", "top0_accuracy", "'top0_accuracy' is unknown"),
        ("bce_with_logits", "top2_accuracy", "there are none"),
        (
            "cross_entropy",
            "r2",
            r"'r2' does not fit a prediction of shape \[150, 3\] and a target of shape \[150\]",
        ),
    ],
)
def test_metrics_that_do_not_fit(loss: str, metric: str, message: str) -> None:
    model, x = linear(3)
    y = np.zeros(len(x), np.int64) if loss == "cross_entropy" else np.zeros((len(x), 3), np.float32)
    with pytest.raises(InputError, match=message):
        Trainer(model, loss, metrics=[metric]).evaluate(x, y)


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delitem(sys.modules, "sklearn.metrics", raising=False)
    model, _ = linear(3)
    Trainer(model, "cross_entropy", metrics=["accuracy", "perplexity"])
    with pytest.raises(
        MissingPackageError, match="The metric 'f1' needs sklearn, which is not installed: pip install"
    ):
        Trainer(model, "cross_entropy", metrics=["f1"])


def test_resumed_with_the_same_metrics(tmp_path: Path) -> None:
    from trainer.test_resume import InterruptAt

    model, x = linear(3)
    y = np.random.default_rng(1).integers(0, 3, len(x))
    names = ["f1", "perplexity", "top2_accuracy", "accuracy"]
    options = {"epochs": 3, "batch_size": 32, "validation": 0.2, "verbose": False}
    straight = Trainer(model, "cross_entropy", metrics=names)
    straight.fit(x, y, **options)
    stopped = Trainer(model, "cross_entropy", metrics=names, directory=tmp_path / "run")
    stopped.fit(x, y, callbacks=[InterruptAt(6)], **options)
    resumed = Trainer.resume(tmp_path / "run")
    assert [metric.name for metric in resumed.metrics] == names
    assert resumed.fit(x, y, **options) == straight.history


@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_loss_of_many_equal_terms(loss: str) -> None:
    """ONNX Runtime adds one by one: the loss of a million terms was 7e-4 off."""
    count = 1_000_000
    nodes = [helper.make_node("Mul", ["x", "w"], ["y"])]
    model = models.make_model(nodes, {"x": ["n", 4]}, {"y": ["n", 4]}, {"w": np.ones(1, np.float32)})
    x = np.full((count // 4, 4), 0.1, np.float32)
    trainer = Trainer(model, loss, learning_rate=0.0, metrics=[])
    target = np.zeros_like(x) if loss == "mse" else np.arange(len(x)) % 4
    exact = float(x[0, 0].astype(np.float64) ** 2) if loss == "mse" else math.log(4)
    assert trainer.evaluate(x, target, batch_size=len(x))["loss"] == pytest.approx(exact, rel=3e-7)
    history = trainer.fit(x, target, batch_size=len(x), verbose=False)
    assert history["loss"][0] == pytest.approx(exact, rel=3e-7)
