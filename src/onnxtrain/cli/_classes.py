"""Determines the class names of a run, and reports how well each class is predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from onnxtrain.cli._loss import label_targets
from onnxtrain.cli._table_report import share
from onnxtrain.errors import InputError
from onnxtrain.losses import loss_class
from onnxtrain.runtime.dtypes import Array
from onnxtrain.tables import category_numbers
from onnxtrain.tables import class_names as names_of_classes
from onnxtrain.trainer import Trainer

# Metrics whose value depends on which of two classes is the positive one.
_OF_ONE_CLASS = ("f1", "precision", "recall")

# Larger confusion matrices do not fit on a terminal.
_SHOWN = 20


class MetricChoice(NamedTuple):
    """The metrics to record in a run, as arguments of `Trainer`.

    Attributes:
        metrics: names of the metrics, e.g. ["accuracy", "f1"]; None for the loss's default metrics.
        positive: index of the positive class; None if the user did not choose one.
    """

    metrics: list[str] | None
    positive: int | None


def chosen_metrics(
    metrics: Sequence[str] | None, positive: str | None, classes: Sequence[str] | None
) -> MetricChoice:
    """Returns the metrics chosen with `--metric` and `--positive`.

    Named classes are sorted alphabetically, so their order does not tell which class is positive. If the classes have
    names and `positive` is None, f1, precision and recall are therefore replaced with their means over the classes
    (f1_macro and so on). If only `positive` is given, the metrics are accuracy, f1, precision and recall.

    Args:
        metrics: values of `--metric`.
        positive: value of `--positive`: the name of a class, or its index for a numeric target.
        classes: names of the classes in the order of their indices; None for a numeric target.

    Raises:
        InputError: `positive` is neither the name of a class nor, for a numeric target, an index.
    """
    chosen = list(metrics) if metrics else None
    if positive is None:
        if chosen is not None and classes is not None:
            means = {name: f"{name}_macro" for name in ("f1", "precision", "recall")}
            chosen = list(dict.fromkeys(means.get(name, name) for name in chosen))
        return MetricChoice(chosen, None)
    if classes is None:
        if not positive.isdecimal():
            raise InputError(
                f"--positive is '{positive}', but the target contains numbers, not strings: pass the index "
                "of a class, such as 1."
            )
        number = int(positive)
    elif positive in (numbers := category_numbers(classes)):
        number = numbers[positive]
    else:
        raise InputError(f"--positive is '{positive}'; the classes are {', '.join(classes)}.")
    return MetricChoice(chosen or ["accuracy", "f1", "precision", "recall"], number)


def chosen_class_weight(texts: Sequence[str] | None, classes: Sequence[str] | None) -> Any:
    """Parses `--class-weight`.

    Args:
        texts: values of the option, e.g. ["fraud=10"].
        classes: names of the classes in the order of their indices; None for a numeric target.

    Returns:
        "balanced", weights by class index, or None if the option is not given.

    Raises:
        InputError: a value is neither "balanced" alone nor CLASS=WEIGHT, or there is no such class.

    >>> chosen_class_weight(["fraud=10"], ["fine", "fraud"]), chosen_class_weight(["1=0.5"], None)
    ({1: 10.0}, {1: 0.5})
    """
    if not texts or list(texts) == ["balanced"]:
        return "balanced" if texts else None
    weights: dict[int, float] = {}
    for text in texts:
        # Split at the last "=", because class names may contain it.
        name, _, weight = text.rpartition("=")
        try:
            value = float(weight)
            number = int(name) if classes is None else category_numbers(classes)[name]
        except (ValueError, KeyError):
            listed = "" if classes is None else f"; the classes are {', '.join(classes)}"
            raise InputError(
                f"--class-weight is '{text}'; give balanced alone, or CLASS=WEIGHT such as "
                f"{'1' if classes is None else classes[-1]}=10{listed}."
            ) from None
        if number in weights:
            raise InputError(f"--class-weight names the class '{name}' twice.")
        weights[number] = value
    return weights


def class_names(trainer: Trainer, classes: Sequence[str] | None) -> list[str] | None:
    """Returns the names of the classes that a run predicts, in the order of their indices.

    Returns None if the run's targets are not classes, or if the number of classes is unknown. Classes of a numeric
    target have no names; their indices, as strings, are returned instead.

    Args:
        trainer: trainer of the run.
        classes: names of the classes in the table; None for a numeric target.
    """
    targets = label_targets(trainer)
    if not targets:
        return None
    labels = targets[0].class_labels
    if labels is None:
        return ["0", "1"] if loss_class(trainer.loss_name).activation == "sigmoid" else None
    return names_of_classes(classes, labels.count)


def _positive(trainer: Trainer, names: Sequence[str] | None) -> str | None:
    """Returns the name of the positive class; None if there is no positive class and metrics are means over classes."""
    number = trainer.positive
    if number is None:
        # The default of scikit-learn's `pos_label`.
        number = 1 if names is not None and len(names) == 2 else None
    if number is None:
        return None
    return names[number] if names is not None and number < len(names) else str(number)


def _of_one_class(trainer: Trainer, metric: str) -> bool:
    """True if a metric, such as f1, measures only the positive class.

    AUROC measures only the positive class if the user has chosen one with `--positive`. Otherwise, two classes
    have the same AUROC, and for more than two classes, AUROC is the mean over the classes.
    """
    return metric in _OF_ONE_CLASS or (metric == "auroc" and trainer.positive is not None)


def metric_labels(trainer: Trainer, classes: Sequence[str] | None, keys: Sequence[str]) -> dict[str, str]:
    """Maps the key of each recorded value to a label, e.g. "val_f1" to "val_f1 of 'fraud'".

    The label names the positive class if the metric measures only that class.

    Args:
        trainer: trainer of the run.
        classes: names of the classes; None for a numeric target.
        keys: keys of the recorded values, e.g. ["loss", "val_f1"].
    """
    name = _positive(trainer, class_names(trainer, classes))
    return {
        key: f"{key} of '{name}'"
        if name is not None and _of_one_class(trainer, key.removeprefix("val_"))
        else key
        for key in keys
    }


def positive_remark(trainer: Trainer, classes: Sequence[str] | None) -> str | None:
    """Returns a note that lists the metrics of the positive class and the metrics that are means over classes.

    Returns None if the run records neither kind of metric.
    """
    names = [metric.name for metric in trainer.metrics]
    of_one = [name for name in names if _of_one_class(trainer, name)]
    of_all = [name for name in names if name.endswith("_macro")]
    positive = _positive(trainer, class_names(trainer, classes))
    parts = []
    if of_one and positive is not None:
        parts.append(f"{', '.join(of_one)}: of the class '{positive}'")
    if of_all:
        hint = "; --positive CLASS names one" if classes is not None and trainer.positive is None else ""
        parts.append(f"{', '.join(of_all)}: the mean over classes{hint}")
    return f"Metrics: {'. '.join(parts)}." if parts else None


def class_report(matrix: Array, names: Sequence[str]) -> list[dict[str, Any]]:
    """Computes a report per class, like scikit-learn's `classification_report`.

    The report contains the number and share of samples, precision, recall and F1 of each class. Precision is 0 for
    a class that is never predicted, and recall is 0 for a class without samples.

    Args:
        matrix: the confusion matrix; rows are true classes, columns are predicted classes.
        names: names of the classes.

    >>> import numpy as np
    >>> class_report(np.array([[8, 0], [1, 1]]), ["fine", "fraud"])[1]
    {'class': 'fraud', 'samples': 2, 'share': 0.2, 'precision': 1.0, 'recall': 0.5, 'f1': 0.6666666666666666}
    """
    hits, samples, guesses = matrix.diagonal(), matrix.sum(axis=1), matrix.sum(axis=0)
    total = max(int(samples.sum()), 1)
    return [
        {
            "class": name,
            "samples": int(of_class),
            "share": int(of_class) / total,
            # Like scikit-learn with zero_division=0.
            "precision": float(hit / guess) if guess else 0.0,
            "recall": float(hit / of_class) if of_class else 0.0,
            "f1": float(2 * hit / (of_class + guess)) if of_class + guess else 0.0,
        }
        for name, hit, of_class, guess in zip(names, hits, samples, guesses, strict=True)
    ]


def report_rows(report: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Formats the result of :func:`class_report` as rows of a table."""
    total = sum(row["samples"] for row in report)
    return [
        (
            row["class"],
            f"{row['samples']:,}",
            share(row["samples"], total),
            *(f"{row[key]:.6g}" for key in ("precision", "recall", "f1")),
        )
        for row in report
    ]


def confusion_matrix_if_small(
    trainer: Trainer, x: Any, y: Any, names: Sequence[str] | None, batch_size: int | None
) -> Any:
    """Computes the confusion matrix of a run on a dataset, unless the matrix is too large to print.

    Args:
        trainer: trainer of the run.
        x: arrays for the inputs.
        y: arrays for the targets.
        names: names of the classes; None if their number is unknown.
        batch_size: samples per batch; None for the default of `Trainer.confusion_matrix`.

    Returns:
        The matrix, int64 [classes, classes]. None if there are more than 20 classes, if their number is unknown, if
        samples do not have exactly one class each, or if the model has no targets or no prediction output.
    """
    targets = label_targets(trainer)
    if names is None or len(names) > _SHOWN or not targets or trainer.prediction is None:
        return None
    shape = targets[0].shape
    if shape is None or not (len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)):
        # Other targets have a class per position, or several labels per sample.
        return None
    return trainer.confusion_matrix(x, y, batch_size=batch_size)
