"""Computes metrics over a whole dataset, independent of how it is divided into batches."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from onnxtrain._dialects import advice
from onnxtrain._printable import get_logger
from onnxtrain.errors import InputError
from onnxtrain.losses import loss_class
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.trainer._metrics.whole_set import WHOLE_METRICS, Task, aligned, has_nan, measure_of

_log = get_logger()

# Sums, not means: means of batches of different sizes cannot be averaged.
Measure = Callable[[Array, Array, InputSpec], tuple[float, float]]
MetricFunction = Callable[[Array, Array], float]


@dataclass(frozen=True)
class Metric:
    """Metric over a dataset, computed from per-batch sums, from all predictions at once, or from the loss.

    Attributes:
        name: key in the history, e.g. "accuracy".
        measure: for a metric that is a mean: `(prediction, target, spec) -> (total, count)` for one batch, where `spec`
            describes the target. The mean is the sum of totals divided by the sum of counts.
        finish: function that converts the mean of `measure` to the metric, e.g. `math.sqrt` for "rmse".
        higher_is_better: True for "accuracy", False for "mae"; None if unknown. Callbacks use it to compare epochs.
        function: for a metric that needs the whole dataset at once: `(predictions, targets) -> value`.
        of_loss: for a metric that depends only on the loss, e.g. perplexity: `(mean loss) -> value`.

    Raises:
        InputError: not exactly one of `measure`, `function` and `of_loss` is given.
    """

    name: str
    measure: Measure | None = None
    finish: Callable[[float], float] = float
    higher_is_better: bool | None = None
    function: MetricFunction | None = None
    of_loss: Callable[[float], float] | None = None

    def __post_init__(self) -> None:
        if [self.measure, self.function, self.of_loss].count(None) != 2:
            raise InputError(f"Metric '{self.name}': pass either measure or function (or of_loss).")

    @property
    def looks_at_predictions(self) -> bool:
        """True if the metric needs predictions and targets."""
        return self.of_loss is None


MetricSpec = str | Metric | MetricFunction


# These need logits of several classes along axis 1.
_NEED_CLASSES = ("accuracy", "probability_accuracy")


def _accuracy(prediction: Array, target: Array, spec: InputSpec) -> tuple[float, float]:
    """Returns the number of correct predictions and the number of labels, not counting ignored labels.

    Compares logits [N, C, d1, ...] with labels [N, d1, ...]. Logits with a different class axis are transposed first;
    see :func:`aligned`.
    """
    prediction, target = aligned(prediction, target, spec)
    _require_shape("accuracy", prediction, target, (*prediction.shape[:1], *prediction.shape[2:]))
    guess = prediction.argmax(axis=1)
    ignored = spec.class_labels.ignore_index if spec.class_labels else None
    counted = np.ones(target.shape, bool) if ignored is None else target != ignored
    # argmax returns the index of a NaN, if there is one.
    highest = np.take_along_axis(prediction, np.expand_dims(guess, 1), axis=1)[:, 0]
    return _share((guess == target)[counted], highest[counted])


def _probability_accuracy(prediction: Array, target: Array, spec: InputSpec) -> tuple[float, float]:
    """Counts positions where logits and target probabilities, both [N, C, d1, ...], have the same argmax.

    Returns:
        The number of matches and the number of positions.
    """
    _require_shape("probability_accuracy", prediction, target, prediction.shape)
    return _share(prediction.argmax(axis=1) == target.argmax(axis=1), prediction)


def _binary_accuracy(prediction: Array, target: Array, spec: InputSpec) -> tuple[float, float]:
    """Counts correct predictions of a binary or multilabel classifier. Positive logits predict 1, all others 0.

    Returns:
        The number of correct predictions and the number of predictions.
    """
    _require_shape("binary_accuracy", prediction, target, prediction.shape)
    return _share((prediction > 0) == (target > 0.5), prediction)


def _share(hits: Array, scores: Array) -> tuple[float, float]:
    """Returns the number of hits and the number of predictions. The number of hits is NaN if any score is NaN."""
    return math.nan if has_nan(scores) else float(np.count_nonzero(hits)), float(hits.size)


def _absolute_error(prediction: Array, target: Array, spec: InputSpec) -> tuple[float, float]:
    _require_shape("mae", prediction, target, prediction.shape)
    # Summed in float64: a float32 sum over a large dataset loses digits of later batches.
    return float(np.abs(prediction.astype(np.float64) - target).sum()), float(prediction.size)


def _squared_error(prediction: Array, target: Array, spec: InputSpec) -> tuple[float, float]:
    _require_shape("mse", prediction, target, prediction.shape)
    return float(((prediction.astype(np.float64) - target) ** 2).sum()), float(prediction.size)


def _require_shape(name: str, prediction: Array, target: Array, expected: tuple[int, ...]) -> None:
    """Raises InputError unless the target has the expected shape; numpy might broadcast other shapes."""
    # Shapes [N, 1] and [N] broadcast to [N, N], which would compare every sample with every other.
    if target.shape != expected or (name in _NEED_CLASSES and prediction.ndim < 2):
        raise InputError(
            f"The metric '{name}' does not fit a prediction of shape {list(prediction.shape)} and a target of "
            f"shape {list(target.shape)}; choose another, or pass a function (prediction, target)."
        )


def _exponential(loss: float) -> float:
    # math.exp raises OverflowError above 709.
    return math.inf if loss > 700 else math.exp(loss)


_ACCURACY = Metric("accuracy", _accuracy, higher_is_better=True)

METRICS: dict[str, Metric] = {
    "accuracy": _ACCURACY,
    # All kinds of accuracy have the key "accuracy", so that a history can be read without knowing the form of the
    # target.
    "probability_accuracy": Metric("accuracy", _probability_accuracy, higher_is_better=True),
    "binary_accuracy": Metric("accuracy", _binary_accuracy, higher_is_better=True),
    "mae": Metric("mae", _absolute_error, higher_is_better=False),
    "mse": Metric("mse", _squared_error, higher_is_better=False),
    # The root of the mean over the whole dataset, not the mean of batches' roots.
    "rmse": Metric("rmse", _squared_error, math.sqrt, higher_is_better=False),
    "perplexity": Metric("perplexity", of_loss=_exponential, higher_is_better=False),
    **{
        name: Metric(name, function=partial(measure, name, Task()), higher_is_better=True)
        for name, measure in WHOLE_METRICS.items()
    },
}
"""Metrics by name, except top-k accuracies such as "top5_accuracy"."""


def default_metrics(target: InputSpec | None, loss: str) -> list[str]:
    """Returns the names of the metrics that a trainer records by default, e.g. ["accuracy"] for class labels.

    Args:
        target: description of the target, or None if the model has no target.
        loss: class name of the loss, e.g. "CrossEntropyLoss".

    Returns:
        The names; [] without a target. For an unknown loss, ["accuracy"] if the target contains class labels,
        otherwise [].
    """
    if target is None:
        return []
    if target.class_labels is not None:
        return list(loss_class(loss).label_metrics)
    return list(loss_class(loss).default_metrics)


def make_metrics(specs: Iterable[MetricSpec], task: Task = Task()) -> list[Metric]:  # noqa: B008 it is frozen
    """Converts names, :class:`Metric` objects and functions `(prediction, target) -> float` to metrics.

    A function is called once, with all predictions and targets of a dataset; its key is its `__name__`. `task`
    describes predictions and targets, for named metrics.

    Raises:
        InputError: a name is unknown or does not suit the task, two metrics have the same key, or an entry has
            another type.
        MissingPackageError: a package that a metric needs is not installed.
    """
    if isinstance(specs, str):
        specs = [specs]
    metrics = [_make(spec, task) for spec in specs]
    names = [metric.name for metric in metrics]
    # Keys of the history with another meaning.
    reserved = {"epoch", "loss", "learning_rate"}
    wrong = sorted(
        {name for name in names if names.count(name) > 1 or name in reserved or name.startswith("val_")}
    )
    if wrong:
        raise InputError(
            f"Choosing metrics: {', '.join(wrong)} is already used; give each function a unique __name__ "
            "that does not begin with 'val_'."
        )
    return metrics


def _make(spec: MetricSpec, task: Task) -> Metric:
    if isinstance(spec, Metric):
        return spec
    if isinstance(spec, str):
        return _named(spec, task)
    if callable(spec):
        return Metric(getattr(spec, "__name__", type(spec).__name__), function=spec)
    raise InputError(
        f"Choosing metrics: received {type(spec).__name__}; pass names or functions (prediction, target)."
    )


def _named(name: str, task: Task) -> Metric:
    if (function := measure_of(name, task)) is not None:
        return Metric(name, function=function, higher_is_better=True)
    if name not in METRICS:
        meant = advice("metrics", name, [*METRICS, "top5_accuracy"])
        raise InputError(
            f"Choosing metrics: {name!r} is unknown; {f'{meant}, or ' if meant else ''}choose from "
            f"{', '.join(METRICS)}, top5_accuracy (any number), or pass a function."
        )
    # A loss without a name is the model's own, which may be a cross-entropy.
    if name == "perplexity" and task.loss and loss_class(task.loss).activation not in ("softmax", "exp"):
        raise InputError(
            f"Choosing metrics: the perplexity is the exponential of a mean cross-entropy; the loss is {task.loss}."
        )
    return METRICS[name]


@dataclass
class Averages:
    """Sums of loss and metrics over a dataset, updated batch by batch.

    Attributes:
        sums: [total, count] by key, as Python floats, which are exact in JSON.
        parts: (prediction, target) of each batch, kept for metrics that are functions of the whole dataset; empty
            if there are no such metrics.
    """

    sums: dict[str, list[float]] = field(default_factory=dict)
    parts: list[tuple[Array, Array]] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> Averages:
        # Arrays of predictions are never modified, so snapshots can share them.
        return Averages({key: list(entry) for key, entry in self.sums.items()}, list(self.parts))

    def add(self, key: str, total: float, count: float) -> None:
        """Adds the total and the count of one batch."""
        entry = self.sums.setdefault(key, [0.0, 0.0])
        entry[0] += total
        entry[1] += count

    def add_loss(self, loss: float, count: float | None) -> None:
        """Adds the loss of a batch.

        Args:
            loss: loss of the batch.
            count: weight of the batch in the mean loss; None to sum the losses.
        """
        if count is None:
            self.sums.setdefault("loss", [0.0, 1.0])[0] += loss
        else:
            # The loss of a batch without labels is NaN, and NaN * 0 is NaN.
            self.add("loss", loss * count if count else 0.0, count)

    def add_metrics(
        self, metrics: Sequence[Metric], prediction: Array, target: Array, spec: InputSpec
    ) -> None:
        """Adds the metrics of a batch."""
        for metric in metrics:
            if metric.measure is not None:
                self.add(metric.name, *metric.measure(prediction, target, spec))
        if any(metric.function is not None for metric in metrics):
            # Copied, because ONNX Runtime writes the next batch's outputs to the same memory.
            self.parts.append((prediction.copy(), target.copy()))

    def add_skipped(self, metrics: Sequence[Metric]) -> None:
        """Adds a batch whose labels are all ignored, with zero weight in the averages.

        If all batches are skipped, the averages are NaN.
        """
        for key in ("loss", *(metric.name for metric in metrics if metric.measure is not None)):
            self.add(key, 0.0, 0.0)

    def running(self, metrics: Sequence[Metric]) -> dict[str, float]:
        """Returns the averages so far by key, without metrics that are functions of the whole dataset."""
        finish: Mapping[str, Callable[[float], float]] = {metric.name: metric.finish for metric in metrics}
        return {
            key: finish.get(key, float)(total / count) if count else math.nan
            for key, (total, count) in self.sums.items()
        }

    def values(self, metrics: Sequence[Metric], prefix: str = "") -> dict[str, float]:
        """Returns the loss and the metrics of the whole dataset by name; NaN if all labels are ignored.

        Args:
            metrics: the metrics that were added.
            prefix: prefix of the returned names, e.g. "val_".
        """
        values = self.running(metrics)
        # Concatenated once, at the end of the epoch; concatenating batch by batch would copy repeatedly.
        joined = [np.concatenate(arrays) for arrays in zip(*self.parts, strict=True)]
        unknown = [
            metric.name
            for metric in metrics
            if metric.measure is not None and math.isnan(self.sums.get(metric.name, [0.0])[0])
        ]
        for metric in metrics:
            if metric.of_loss is not None and "loss" in values:
                values[metric.name] = _number(metric, metric.of_loss(values["loss"]))
            if metric.function is not None:
                values[metric.name] = _number(metric, metric.function(*joined)) if joined else math.nan
                if joined and math.isnan(values[metric.name]) and has_nan(joined[0]):
                    unknown.append(metric.name)
        if unknown:
            _log.warning(
                "The model predicts NaN for some samples, so %s %s NaN.",
                ", ".join(f"'{prefix}{name}'" for name in unknown),
                "is" if len(unknown) == 1 else "are",
            )
        # In the order of the metrics, so that the columns of logs do not move.
        names = [name for name in ("loss", *(metric.name for metric in metrics)) if name in values]
        return {prefix + name: values[name] for name in names}


def _number(metric: Metric, value: object) -> float:
    # Functions often return a numpy array of one element.
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise InputError(f"The metric '{metric.name}' returned {value!r}; it must return one number.")
    return float(value)
