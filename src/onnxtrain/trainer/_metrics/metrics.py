"""Computes metrics over a whole dataset, independent of how it is divided into batches."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from onnxtrain._dialects import advice
from onnxtrain._printable import get_logger
from onnxtrain._words import words
from onnxtrain.errors import InputError
from onnxtrain.losses import loss_class
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.trainer._metrics.whole_set import WHOLE_METRICS, Task, aligned, has_nan, measure_of

_log = get_logger()

# Sums, not means: means of batches of different sizes cannot be averaged.
Measure = Callable[[Array, Array, InputSpec], tuple[float, float]]
MetricFunction = Callable[..., float]
_PREDICTED = ("prediction of the run", "target of the run")


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
        arguments: names of the outputs and targets that `measure` or `function` takes, e.g. ("kind", "cls"); of an
            output alone, its target is found. () for the run's prediction and its first target.

    Raises:
        InputError: not exactly one of `measure`, `function` and `of_loss` is given.
    """

    name: str
    measure: Measure | None = None
    finish: Callable[[float], float] = float
    higher_is_better: bool | None = None
    function: MetricFunction | None = None
    of_loss: Callable[[float], float] | None = None
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Not `== None`, which objects such as those of torchmetrics overload.
        given = [value for value in (self.measure, self.function, self.of_loss) if value is not None]
        if len(given) != 1:
            raise InputError(f"Metric '{self.name}': pass either measure or function (or of_loss).")

    @property
    def looks_at_predictions(self) -> bool:
        """True if the metric needs predictions and targets."""
        return self.of_loss is None


MetricSpec = str | Metric | MetricFunction
Metrics = Sequence[MetricSpec] | Mapping[str, MetricSpec | Sequence[MetricSpec]]
"""Metrics of the prediction, or of several outputs by name, e.g. {"kind": "accuracy", "value": ["mae", "r2"]}."""


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
            f"shape {list(target.shape)}; choose another{words().or_function('(prediction, target)')}. "
            f"{words().metric_of_output(name)}"
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


def listed(metrics: Metrics) -> list[MetricSpec]:
    """Returns metrics as a list. A metric of an output is the text "output:metric", or a metric with `arguments`.

    Raises:
        InputError: a metric of an output is neither a name nor a function.
    """
    if isinstance(metrics, str):
        return [metrics]
    if not isinstance(metrics, Mapping):
        return list(metrics)
    found: list[MetricSpec] = []
    for output, chosen in metrics.items():
        for spec in [chosen] if isinstance(chosen, str | Metric) or callable(chosen) else chosen:
            if isinstance(spec, str):
                found.append(f"{output}:{spec}")
            else:
                metric = _make(spec, Task())
                found.append(replace(metric, name=f"{output}_{metric.name}", arguments=(output,)))
    return found


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
        output, colon, name = spec.rpartition(":")
        if not colon:
            return _named(spec, task, spec)
        metric = _named(name, task.of(output), spec)
        return replace(metric, name=f"{output}_{metric.name}", arguments=(output,))
    kind = type(spec)
    if kind.__module__.split(".")[0] == "torchmetrics" or any(
        base.__module__ == "torch.nn.modules.module" for base in kind.__mro__
    ):
        raise InputError(
            f"Choosing metrics: {kind.__name__} is a metric of PyTorch tensors; pass "
            f"onnxtrain.trainer.torch_metric({kind.__name__}(...))."
        )
    if callable(spec):
        return Metric(getattr(spec, "__name__", type(spec).__name__), function=spec)
    raise InputError(
        f"Choosing metrics: received {type(spec).__name__}; pass names or functions (prediction, target)."
    )


def _named(name: str, task: Task, spec: str) -> Metric:
    """Returns a metric by its name; `spec` is what the user wrote, e.g. "kind:accuracy"."""
    if (function := measure_of(name, task)) is not None:
        return Metric(name, function=function, higher_is_better=True)
    if name not in METRICS:
        meant = advice("metrics", name, [*METRICS, "top5_accuracy"])
        raise InputError(
            f"Choosing metrics: {spec!r} is unknown; {f'{meant}, or ' if meant else ''}choose from "
            f"{', '.join(METRICS)}, top5_accuracy (any number){words().or_function()}."
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
        parts: the arrays of each batch, (prediction, target) by default, kept for metrics that are functions of the
            whole dataset; empty if there are no such metrics.
    """

    sums: dict[str, list[float]] = field(default_factory=dict)
    parts: list[tuple[Array, ...]] = field(default_factory=list)

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
        self,
        metrics: Sequence[Metric],
        prediction: Array,
        target: Array,
        spec: InputSpec,
        named: Mapping[str, tuple[Array, InputSpec | None]] | None = None,
    ) -> None:
        """Adds the metrics of a batch.

        Args:
            metrics: the metrics.
            prediction: prediction of the run.
            target: first target.
            spec: description of the first target.
            named: all outputs and targets by name, with descriptions of the targets; for metrics with `arguments`.
        """
        known: dict[str, tuple[Array, InputSpec | None]] = {
            **(named or {}), _PREDICTED[0]: (prediction, None), _PREDICTED[1]: (target, spec)
        }  # fmt: skip
        for metric in metrics:
            if metric.measure is not None:
                (scores, _), (truth, of_truth) = (known[name] for name in metric.arguments or _PREDICTED)
                self.add(metric.name, *metric.measure(scores, truth, of_truth or spec))
        columns = _columns(metrics)
        if columns:
            # Copied, because ONNX Runtime writes the next batch's outputs to the same memory.
            self.parts.append(tuple(known[name][0].copy() for name in columns))

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
        arrays = (np.concatenate(arrays) for arrays in zip(*self.parts, strict=True))
        joined = dict(zip(_columns(metrics), arrays, strict=False))
        unknown = [
            metric.name
            for metric in metrics
            if metric.measure is not None and math.isnan(self.sums.get(metric.name, [0.0])[0])
        ]
        for metric in metrics:
            if metric.of_loss is not None and "loss" in values:
                values[metric.name] = _number(metric, metric.of_loss(values["loss"]))
            if metric.function is not None:
                taken = [joined[name] for name in metric.arguments or _PREDICTED] if joined else []
                values[metric.name] = _number(metric, _called(metric, taken)) if joined else math.nan
                if joined and math.isnan(values[metric.name]) and has_nan(taken[0]):
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


def _columns(metrics: Sequence[Metric]) -> list[str]:
    """Returns the names of the arrays that metrics need of the whole dataset, each once."""
    names = (m.arguments or _PREDICTED for m in metrics if m.function is not None)
    return list(dict.fromkeys(name for group in names for name in group))


def _called(metric: Metric, arrays: Sequence[Array]) -> object:
    assert metric.function is not None
    try:
        return metric.function(*arrays)
    except (AttributeError, TypeError) as error:
        # A function of PyTorch tensors: "'numpy.ndarray' object has no attribute 'softmax'".
        if "numpy.ndarray" not in str(error):
            raise
        raise InputError(
            f"The metric '{metric.name}' raised {type(error).__name__}: {error}. A metric function takes NumPy arrays; "
            f"for a function of PyTorch tensors, pass torch_metric({metric.name}), of onnxtrain.trainer."
        ) from error


def complete(
    metric: Metric, outputs: Sequence[str], targets: Sequence[str], prediction: str | None
) -> Metric:
    """Returns a metric with the names of all of its arguments.

    Args:
        metric: a metric.
        outputs: names of the outputs of the model.
        targets: names of the targets.
        prediction: output that metrics compare with the first target by default.

    Raises:
        InputError: an argument is neither an output nor a target, or an output has no target of its own.
    """
    doing = f"Choosing metrics: '{metric.name}'"
    shown = f"the outputs are {', '.join(outputs) or 'none'}, the targets {', '.join(targets) or 'none'}"
    if not metric.arguments:
        names = _required(metric.function)
        by_name = len(names) == 2 and names[0] in outputs and names[1] in targets
        if len(names) <= 2 and not by_name:
            return metric
        # As for a loss: arguments with the name of an output are outputs, or else the first arguments.
        free = iter(
            [] if set(names) & set(outputs) else [prediction, *(o for o in outputs if o != prediction)]
        )
        arguments = [n if n in outputs or n in targets else next(free, None) for n in names]
        if None in arguments:
            raise InputError(
                f"{doing} takes {', '.join(names)}, but {shown}. Name the arguments like outputs and targets."
            )
        return replace(metric, arguments=tuple(map(str, arguments)))
    unknown = [name for name in metric.arguments if name not in outputs and name not in targets]
    if unknown:
        raise InputError(f"{doing} reads {', '.join(unknown)}, but {shown}.")
    if len(metric.arguments) > 1:
        return metric
    output = metric.arguments[0]
    if output in targets or len(targets) not in (1, len(outputs)):
        raise InputError(
            f"{doing}: which target belongs to '{output}' is ambiguous, as {shown}. Pass a function with the names of "
            "outputs and targets as arguments."
        )
    return replace(metric, arguments=(output, targets[outputs.index(output) if len(targets) > 1 else 0]))


def _required(function: Callable[..., Any] | None) -> list[str]:
    """Returns the names of the required arguments of a function; [] if they are unknown."""
    try:
        parameters = inspect.signature(function).parameters.values() if function is not None else ()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds and p.default is p.empty]


def _number(metric: Metric, value: object) -> float:
    # Functions often return a numpy array of one element.
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise InputError(f"The metric '{metric.name}' returned {value!r}; it must return one number.")
    return float(value)
