"""Metrics: figures of merit beside the loss, averaged over batches of any size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from onnxtrain.errors import InputError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.manifest import InputSpec

__all__ = ["METRICS", "Averages", "Metric", "MetricSpec", "default_metrics", "make_metrics"]

Measure = Callable[[Array, Array, InputSpec], tuple[float, float]]
MetricFunction = Callable[[Array, Array], float]


@dataclass(frozen=True)
class Metric:
    """A metric as sums, so that the value over a data set does not depend on how it is cut into batches.

    Attributes:
        name: its key in the history.
        measure: (prediction, target, target's specification) -> (total, count) of one batch.
        finish: from the mean over all batches, total / count, to the value.
        higher_is_better: for callbacks that compare values.
    """

    name: str
    measure: Measure
    finish: Callable[[float], float] = float
    higher_is_better: bool = False


MetricSpec = str | Metric | MetricFunction


def _accuracy(prediction: Array, target: Array, spec: InputSpec) -> tuple[float, float]:
    """Scores [N, C, d1, ...] against labels [N, d1, ...]; labels equal to `ignore_index` do not count."""
    hits = prediction.argmax(axis=1) == target
    ignored = spec.class_labels.ignore_index if spec.class_labels else None
    if ignored is None:
        return float(hits.sum()), float(hits.size)
    counted = target != ignored
    return float((hits & counted).sum()), float(counted.sum())


def _probability_accuracy(prediction: Array, target: Array, spec: InputSpec) -> tuple[float, float]:
    """Scores and class probabilities, both [N, C, d1, ...]."""
    hits = prediction.argmax(axis=1) == target.argmax(axis=1)
    return float(hits.sum()), float(hits.size)


def _binary_accuracy(prediction: Array, target: Array, spec: InputSpec) -> tuple[float, float]:
    """Logits (positive means yes) against 0 and 1."""
    hits = (prediction > 0) == (target > 0.5)
    return float(hits.sum()), float(hits.size)


def _absolute_error(prediction: Array, target: Array, spec: InputSpec) -> tuple[float, float]:
    return float(np.abs(prediction.astype(np.float64) - target).sum()), float(prediction.size)


def _squared_error(prediction: Array, target: Array, spec: InputSpec) -> tuple[float, float]:
    return float(((prediction.astype(np.float64) - target) ** 2).sum()), float(prediction.size)


_ACCURACY = Metric("accuracy", _accuracy, higher_is_better=True)

METRICS: dict[str, Metric] = {
    "accuracy": _ACCURACY,
    "probability_accuracy": Metric("accuracy", _probability_accuracy, higher_is_better=True),
    "binary_accuracy": Metric("accuracy", _binary_accuracy, higher_is_better=True),
    "mae": Metric("mae", _absolute_error),
    "mse": Metric("mse", _squared_error),
    "rmse": Metric("rmse", _squared_error, math.sqrt),
}
"""The metrics by the names that the trainer takes."""

_BY_LOSS = {
    "CrossEntropyLoss": ["probability_accuracy"],
    "BCEWithLogitsLoss": ["binary_accuracy"],
    "MSELoss": ["mae", "rmse"],
    "L1Loss": ["mae", "rmse"],
    "HuberLoss": ["mae", "rmse"],
    "SmoothL1Loss": ["mae", "rmse"],
}


def default_metrics(target: InputSpec | None, loss: str) -> list[str]:
    """Returns the metrics that suit a target and the class name of a loss; none for unknown losses."""
    if target is None:
        return []
    if target.class_labels is not None:
        return ["accuracy"]
    return list(_BY_LOSS.get(loss, []))


def make_metrics(specs: Iterable[MetricSpec]) -> list[Metric]:
    """Returns metrics for names, :class:`Metric` objects and functions `(prediction, target) -> float`.

    The value of a function is averaged over batches, weighted by their size; its key is its `__name__`.

    Raises:
        InputError: A name is unknown, a key comes twice, or something is none of these.
    """
    if isinstance(specs, str):
        specs = [specs]
    metrics = [_make(spec) for spec in specs]
    names = [metric.name for metric in metrics]
    reserved = {"epoch", "loss", "learning_rate"}
    wrong = sorted({name for name in names if names.count(name) > 1 or name in reserved})
    if wrong:
        raise InputError(
            f"Choosing metrics: {', '.join(wrong)} is taken already; give each function a __name__ of its "
            "own."
        )
    return metrics


def _make(spec: MetricSpec) -> Metric:
    if isinstance(spec, Metric):
        return spec
    if isinstance(spec, str):
        if spec not in METRICS:
            raise InputError(
                f"Choosing metrics: {spec!r} is unknown; choose from {', '.join(METRICS)}, or pass a "
                "function."
            )
        return METRICS[spec]
    if callable(spec):
        function = spec
        name = getattr(function, "__name__", type(function).__name__)

        def measure(prediction: Array, target: Array, _: InputSpec) -> tuple[float, float]:
            return float(function(prediction, target)) * len(prediction), float(len(prediction))

        return Metric(name, measure)
    raise InputError(
        f"Choosing metrics: received {type(spec).__name__}; pass names or functions (prediction, target)."
    )


@dataclass
class Averages:
    """Running sums of the loss and the metrics over the batches of an epoch.

    Attributes:
        sums: key -> [total, count]. Python floats, which JSON text keeps exactly.
    """

    sums: dict[str, list[float]] = field(default_factory=dict)

    def add(self, key: str, total: float, count: float) -> None:
        """Adds one batch."""
        entry = self.sums.setdefault(key, [0.0, 0.0])
        entry[0] += total
        entry[1] += count

    def add_batch(
        self,
        metrics: Sequence[Metric],
        loss: float,
        count: float | None,
        prediction: Array | None,
        targets: Sequence[Array],
        specs: Sequence[InputSpec],
    ) -> None:
        """Adds loss and metrics of a batch.

        Args:
            metrics: what to add beside the loss.
            loss: of the batch.
            count: what the batch counts in the mean of the loss; None to sum the losses.
            prediction: what the metrics look at; None if they cannot be measured.
            targets: the first one is what they compare it with.
            specs: those of `targets`.
        """
        if count is None:
            self.sums.setdefault("loss", [0.0, 1.0])[0] += loss
        else:
            self.add("loss", loss * count if count else 0.0, count)
        if prediction is not None and targets:
            for metric in metrics:
                self.add(metric.name, *metric.measure(prediction, targets[0], specs[0]))

    def add_skipped(self, metrics: Sequence[Metric]) -> None:
        """Adds a batch that counts nothing."""
        for key in ("loss", *(metric.name for metric in metrics)):
            self.add(key, 0.0, 0.0)

    def values(self, metrics: Sequence[Metric], prefix: str = "") -> dict[str, float]:
        """Returns the averages by key; NaN where nothing counted."""
        finish: Mapping[str, Callable[[float], float]] = {metric.name: metric.finish for metric in metrics}
        return {
            prefix + key: finish.get(key, float)(total / count) if count else math.nan
            for key, (total, count) in self.sums.items()
        }
