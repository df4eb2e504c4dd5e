"""Each named metric against scikit-learn, in each task that it suits, whatever the batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.special import softmax
from sklearn import metrics as reference

from onnxtrain.runtime.manifest import ClassLabels, InputSpec
from onnxtrain.trainer import METRICS
from onnxtrain.trainer._metrics.metrics import Averages, make_metrics
from onnxtrain.trainer._metrics.whole_set import Task

SAMPLES = 61


@dataclass(frozen=True)
class Data:
    """Predictions and targets of a data set.

    Attributes:
        task: what `make_metrics` is told.
        prediction: the model's outputs.
        target: as a data set has them, e.g. with ignored labels.
        truth: for scikit-learn: labels or 0 and 1, without ignored ones; quantities [n, outputs].
        scores: scores of the same positions, float64.
    """

    task: Task
    prediction: np.ndarray
    target: np.ndarray
    truth: np.ndarray
    scores: np.ndarray

    @property
    def guess(self) -> np.ndarray:
        """Predicted labels, or 0 and 1 in the shape of `truth`."""
        return (
            self.scores.argmax(axis=1)
            if self.scores.ndim > self.truth.ndim
            else (self.scores > 0).astype(int)
        )

    @property
    def average(self) -> str:
        """scikit-learn's mean over classes that is the default here."""
        return "binary" if self.truth.ndim == 1 and self.truth.max() == 1 else "macro"


def _labels(classes: int, positions: tuple[int, ...] = ()) -> Data:
    rng = np.random.default_rng(classes)
    # Rounded, so that scores tie.
    scores = np.round(rng.normal(size=(SAMPLES, classes, *positions)) * 2, 1)
    right = scores.argmax(axis=1)
    labels = np.where(rng.random(right.shape) < 0.6, right, rng.integers(0, classes, right.shape))
    labels = np.where(rng.random(right.shape) < 0.2, -100, labels)
    counted = labels.ravel() >= 0
    rows = np.moveaxis(scores, 1, -1).reshape(-1, classes)[counted]
    spec = InputSpec("labels", np.dtype(np.int64), labels.shape, ClassLabels(classes, -100))
    return Data(Task(spec, "CrossEntropyLoss"), scores, labels, labels.ravel()[counted], rows)


def _numbers(loss: str, columns: int) -> Data:
    rng = np.random.default_rng(columns)
    prediction = rng.normal(size=(SAMPLES, columns)) * 2
    noisy = prediction + rng.normal(size=prediction.shape)
    target = noisy if loss == "MSELoss" else (noisy > 0.3).astype(np.float64)
    truth, scores = target, prediction
    if loss == "BCEWithLogitsLoss" and columns == 1:
        truth, scores = truth[:, 0], scores[:, 0]
    if loss == "CrossEntropyLoss":
        target = rng.dirichlet(np.ones(columns), SAMPLES)
        truth = target.argmax(axis=1)
    truth = truth if loss == "MSELoss" else truth.astype(int)
    spec = InputSpec("target", np.dtype(np.float64), target.shape)
    return Data(Task(spec, loss), prediction, target, truth, scores)


TASKS = {
    "two classes": _labels(2),
    "many classes": _labels(5),
    "positions": _labels(4, (3,)),
    "class probabilities": _numbers("CrossEntropyLoss", 4),
    "yes or no": _numbers("BCEWithLogitsLoss", 1),
    "several labels": _numbers("BCEWithLogitsLoss", 3),
    "quantity": _numbers("MSELoss", 1),
    "quantities": _numbers("MSELoss", 3),
}
LABELS = ("two classes", "many classes", "positions")
ONE_RIGHT = (*LABELS, "class probabilities")
YES_OR_NO = ("yes or no", "several labels")
QUANTITIES = ("quantity", "quantities")
CLASSIFICATION = (*ONE_RIGHT, *YES_OR_NO)


@dataclass(frozen=True)
class MetricCase:
    """A metric with the same value by scikit-learn.

    Attributes:
        name: as users write it.
        reference: computes the value.
        tasks: names in `TASKS` of all tasks that the metric suits.
        higher_is_better: as callbacks need it.
    """

    name: str
    reference: Callable[[Data], float]
    tasks: tuple[str, ...]
    higher_is_better: bool = True


def _rates() -> Iterator[MetricCase]:
    for name in ("f1", "precision", "recall"):
        for average in ("", "macro", "micro", "weighted"):

            def rate(data: Data, name: str = name, average: str = average) -> float:
                function = getattr(reference, f"{name}_score")
                return float(
                    function(data.truth, data.guess, average=average or data.average, zero_division=0)
                )

            yield MetricCase(f"{name}_{average}".rstrip("_"), rate, CLASSIFICATION)


def _accuracy(data: Data) -> float:
    return float(np.mean(data.truth == data.guess))


def _auroc(data: Data) -> float:
    if data.scores.ndim == data.truth.ndim:
        return float(reference.roc_auc_score(data.truth, data.scores))
    if data.scores.shape[1] == 2:
        return float(reference.roc_auc_score(data.truth, data.scores[:, 1] - data.scores[:, 0]))
    return float(reference.roc_auc_score(data.truth, softmax(data.scores, axis=1), multi_class="ovr"))


def _mcc(data: Data) -> float:
    columns = (
        [(data.truth, data.guess)] if data.truth.ndim == 1 else zip(data.truth.T, data.guess.T, strict=True)
    )
    return float(np.mean([reference.matthews_corrcoef(*column) for column in columns]))


def _top2(data: Data) -> float:
    return float(
        reference.top_k_accuracy_score(data.truth, data.scores, k=2, labels=range(data.scores.shape[1]))
    )


CASES = [
    MetricCase("accuracy", _accuracy, LABELS),
    MetricCase("probability_accuracy", _accuracy, ("class probabilities",)),
    MetricCase("binary_accuracy", _accuracy, YES_OR_NO),
    *_rates(),
    MetricCase("auroc", _auroc, CLASSIFICATION),
    MetricCase("mcc", _mcc, CLASSIFICATION),
    MetricCase("top2_accuracy", _top2, ("many classes", "positions", "class probabilities")),
    MetricCase("r2", lambda d: reference.r2_score(d.truth, d.scores), QUANTITIES),
    *(
        MetricCase(name, lambda d, f=function: f(d.truth, d.scores), QUANTITIES, higher_is_better=False)
        for name, function in {
            "mae": reference.mean_absolute_error,
            "mse": reference.mean_squared_error,
            "rmse": lambda truth, scores: math.sqrt(reference.mean_squared_error(truth, scores)),
        }.items()
    ),
]
TESTED_APART = {"perplexity": "of the loss, not of predictions: test_metrics.py"}

each_case_and_task = pytest.mark.parametrize(
    ("case", "task"),
    [pytest.param(c, t, id=f"{c.name}-{t.replace(' ', '_')}") for c in CASES for t in c.tasks],
)


def _judged(case: MetricCase, data: Data, prediction: np.ndarray, size: int = SAMPLES) -> float:
    """Returns a metric of a data set in batches, of which the last is smaller."""
    metrics, averages = make_metrics([case.name], data.task), Averages()
    assert data.task.target is not None
    for begin in range(0, SAMPLES, size):
        batch = slice(begin, begin + size)
        averages.add_metrics(metrics, prediction[batch], data.target[batch], data.task.target)
    (value,) = averages.values(metrics).values()
    return value


@each_case_and_task
def test_metric_matches_scikit_learn(case: MetricCase, task: str) -> None:
    data = TASKS[task]
    expected = case.reference(data)
    assert math.isfinite(expected)
    for size in (SAMPLES, 8, 1):
        assert _judged(case, data, data.prediction, size) == pytest.approx(expected, rel=1e-12)


@pytest.mark.sample(every=2)
@each_case_and_task
def test_a_prediction_of_nan_makes_the_metric_nan(case: MetricCase, task: str) -> None:
    data = TASKS[task]
    broken = data.prediction.copy()
    counted = np.argwhere(data.target.reshape(SAMPLES, -1)[:, 0] >= 0) if task in LABELS else [[3]]
    broken[(int(counted[0][0]), -1, *(0,) * (broken.ndim - 2))] = math.nan
    assert math.isnan(_judged(case, data, broken))


@pytest.mark.parametrize("task", ["two classes", "many classes", "yes or no"])
def test_mcc_of_a_single_class_is_zero(task: str) -> None:
    data = TASKS[task]
    spec, prediction = data.task.target, np.abs(data.prediction)
    prediction[:, -1] += prediction.max()
    metrics, averages = make_metrics(["mcc"], data.task), Averages()
    assert spec is not None
    last = np.full_like(data.target, prediction.shape[1] - 1 if task != "yes or no" else 1)
    averages.add_metrics(metrics, prediction, last, spec)
    assert averages.values(metrics) == {"mcc": 0.0}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_callbacks_know_which_values_are_better(case: MetricCase) -> None:
    (metric,) = make_metrics([case.name], TASKS[case.tasks[0]].task)
    assert metric.higher_is_better is case.higher_is_better


def test_every_metric_has_a_case() -> None:
    named = [case.name for case in CASES if case.name in METRICS]
    assert METRICS.keys() - named - TESTED_APART.keys() == set(), "add MetricCase(...) to CASES"
    assert len(set(named)) == len(named)
