"""Computes metrics that are not means over batches, with scikit-learn on the whole dataset."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from onnxtrain._words import argument, words
from onnxtrain.errors import InputError
from onnxtrain.losses import loss_class
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.trainer._optional import optional

TOP_K = 5
"""Value of k for the name "top_k_accuracy"."""

_TOP_K = re.compile(r"top_?([1-9]\d*|k)_accuracy")


@dataclass(frozen=True)
class Task:
    """Describes predictions and targets for metrics.

    Attributes:
        target: description of the target; None if unknown.
        loss: class name of the loss, e.g. "CrossEntropyLoss".
        positive: index of the class that f1, precision, recall and auroc measure. None stands for class 1 if there
            are two classes, otherwise for the mean over all classes.
        of_outputs: descriptions of the targets of other outputs, by the name of the output.
    """

    target: InputSpec | None = None
    loss: str = ""
    positive: int | None = None
    of_outputs: Mapping[str, InputSpec | None] = field(default_factory=dict)

    def of(self, output: str) -> Task:
        """Returns the task of one output of several, whose targets are compared without the loss."""
        return Task(self.of_outputs.get(output))

    @property
    def classes(self) -> int | None:
        """Number of classes if the target contains class labels; None if unknown."""
        labels = self.target.class_labels if self.target is not None else None
        return labels.count if labels is not None else None

    @property
    def has_softmax(self) -> bool:
        """True if the loss is a softmax cross-entropy with a single correct class per position."""
        return loss_class(self.loss).activation == "softmax"

    def check(self) -> None:
        """Raises InputError if `positive` is not a valid class index."""
        if self.positive is None:
            return
        check_positive(self.positive)
        labels = self.target.class_labels if self.target is not None else None
        # With class probabilities as targets, the manifest does not contain the number of classes.
        of_probabilities = labels is None and self.has_softmax
        count = labels.count if labels is not None else None if of_probabilities else 2
        if count is not None and self.positive >= count:
            raise InputError(
                f"{argument('positive')} is {self.positive}, but the classes are 0 to {count - 1}."
            )


def check_positive(number: int | None) -> None:
    """Raises InputError if a positive class is neither None nor an integer >= 0."""
    valid = isinstance(number, int | np.integer) and not isinstance(number, bool) and number >= 0
    if number is not None and not valid:
        raise InputError(
            f"{argument('positive')} is {number!r}; pass the index of the class that f1, precision, recall and auroc "
            "measure, e.g. 1."
        )


@dataclass(frozen=True)
class _Scores:
    """Logits and ground truth of a classification task, without ignored labels.

    Attributes:
        scores: logits: [n, classes] for multiclass, [n] for binary, [n, labels] for multilabel.
        truth: class labels [n] for multiclass; otherwise 0 or 1, in the shape of `scores`.
        one_of: number of classes for multiclass; 0 for binary and multilabel.
    """

    scores: Array
    truth: Array
    one_of: int

    @property
    def guess(self) -> Array:
        """Predictions in the same form as `truth`: class labels for multiclass, otherwise 0 or 1."""
        return self.scores.argmax(axis=1) if self.one_of else (self.scores > 0).astype(np.int64)

    @property
    def judgeable(self) -> bool:
        """True if there are samples and no logit is NaN."""
        return len(self.truth) > 0 and not has_nan(self.scores)

    @property
    def two_classes(self) -> bool:
        """True for binary classification, with one or two logits per sample."""
        return self.one_of == 2 or (not self.one_of and self.truth.ndim == 1)


def _scores(name: str, task: Task, prediction: Array, target: Array) -> _Scores:
    """Converts predictions and targets to a common form for multiclass, binary and multilabel classification.

    Raises:
        InputError: the shapes match none of these tasks.
    """
    prediction, target = aligned(prediction, target, task.target)
    if target.dtype.kind in "iu" and prediction.ndim >= 2:
        _require(name, prediction, target, (*prediction.shape[:1], *prediction.shape[2:]))
        rows, truth = _rows(prediction), target.reshape(-1)
        labels = task.target.class_labels if task.target is not None else None
        if labels is not None and labels.ignore_index is not None:
            counted = truth != labels.ignore_index
            rows, truth = rows[counted], truth[counted]
        return _Scores(rows, truth, rows.shape[1])
    _require(name, prediction, target, prediction.shape)
    # For targets other than class labels, only a cross-entropy of class probabilities has one correct class.
    if task.has_softmax:
        return _Scores(_rows(prediction), _rows(target).argmax(axis=1), prediction.shape[1])
    # Several columns are independent labels (multilabel); any other shape has one binary label per position.
    one = prediction.ndim != 2 or prediction.shape[1] == 1
    shape = (-1,) if one else prediction.shape
    return _Scores(prediction.reshape(shape), (target.reshape(shape) > 0.5).astype(np.int64), 0)


def true_scores(name: str, task: Task, prediction: Array, target: Array) -> tuple[Array, Array]:
    """Returns scores and true answers in one form, without ignored labels: classes [n, classes] and [n], else alike.

    Args:
        name: name of the computation, for error messages.
        task: description of the target.
        prediction: scores of a whole dataset.
        target: targets of a whole dataset.

    Raises:
        InputError: the shapes do not match.
    """
    found = _scores(name, task, prediction, target)
    return found.scores, found.truth


def aligned(prediction: Array, target: Array, spec: InputSpec | None) -> tuple[Array, Array]:
    """Converts logits and labels of a language model to the usual layout: classes along axis 1, labels shifted.

    Other predictions and targets are returned unchanged.

    Args:
        prediction: logits, e.g. [batch, sequence, vocabulary].
        target: labels, e.g. [batch, sequence].
        spec: description of the target; None if unknown.

    Returns:
        Logits, e.g. [batch, vocabulary, sequence - 1], and labels of the next tokens, e.g. [batch, sequence - 1].
    """
    labels = spec.class_labels if spec is not None else None
    if labels is None or not prediction.ndim > labels.axis > 1:
        return prediction, target
    if labels.shift:
        prediction, target = prediction[:, : -labels.shift], target[:, labels.shift :]
    return np.moveaxis(prediction, labels.axis, 1), target


def has_nan(array: Array) -> bool:
    """True if an array contains NaN."""
    return bool(np.isnan(array).any())


def _rows(array: Array) -> Array:
    """Reshapes [N, C, d1, ...] to [N * d1 * ..., C]."""
    return np.moveaxis(array, 1, -1).reshape(-1, array.shape[1])


def _require(name: str, prediction: Array, target: Array, expected: tuple[int, ...]) -> None:
    if target.shape != expected:
        raise InputError(
            f"The metric '{name}' does not fit a prediction of shape {list(prediction.shape)} and a target of shape "
            f"{list(target.shape)}; choose another{words().or_function('(prediction, target)')}. "
            f"{words().metric_of_output(name)}"
        )


def _sklearn(name: str) -> Any:
    return optional("sklearn.metrics", f"The metric '{name}'", "scikit-learn, or 'onnxtrain[metrics]'")


def _decided(
    name: str, task: Task, prediction: Array, target: Array, *, function: str, average: str | None
) -> float:
    """Computes f1, precision or recall, for the positive class or averaged over classes.

    Args:
        name: name of the metric, for error messages.
        task: description of the target, with the positive class, if any.
        prediction: logits of the whole dataset.
        target: targets of the whole dataset.
        function: name of the function in `sklearn.metrics`.
        average: the function's `average` argument; None to derive it from the task.
    """
    data = _scores(name, task, prediction, target)
    if not data.judgeable:
        return math.nan
    truth, guess = data.truth, data.guess
    if average is None and task.positive is not None:
        _require_one_right(name, data)
        truth, guess, average = truth == task.positive, guess == task.positive, "binary"
    average = average or ("binary" if data.two_classes else "macro")
    # zero_division=0: a class that is never predicted has precision 0, without a warning in every epoch.
    measure = getattr(_sklearn(name), function)
    return float(measure(truth, guess, average=average, zero_division=0))


def _require_one_right(name: str, data: _Scores) -> None:
    if not data.one_of and not data.two_classes:
        raise InputError(
            f"The metric '{name}' with a positive class needs one correct class per sample, but these "
            "labels are independent (multilabel). Leave positive out."
        )


def _auroc(name: str, task: Task, prediction: Array, target: Array) -> float:
    """Computes the area under the ROC curve, for the positive class or as the mean over classes (one-vs-rest).

    For two classes, both have the same area. NaN if a logit is NaN, or if some class has no positive or no negative
    samples.
    """
    data = _scores(name, task, prediction, target)
    if not data.judgeable:
        return math.nan
    scores = data.scores.astype(np.float64)
    if task.positive is not None and not data.two_classes:
        _require_one_right(name, data)
        truth = data.truth == task.positive
        # scikit-learn raises or warns, depending on its version; a class missing in one epoch must not stop training.
        if not 0 < truth.sum() < len(truth):
            return math.nan
        return float(_sklearn(name).roc_auc_score(truth, _probabilities(scores)[:, task.positive]))
    if not data.one_of:
        constant = (data.truth == data.truth[:1]).all(axis=0).any()
        return math.nan if constant else float(_sklearn(name).roc_auc_score(data.truth, _ordered(scores)))
    if len(np.unique(data.truth)) < max(2, data.one_of):
        return math.nan
    if data.two_classes:
        # The difference orders samples like the softmax, but is not rounded to 1.0 for confident predictions. Equal
        # infinities are equal logits.
        equal = scores[:, 1] == scores[:, 0]
        difference = np.subtract(scores[:, 1], scores[:, 0], out=np.zeros(len(scores)), where=~equal)
        return float(_sklearn(name).roc_auc_score(data.truth, _ordered(difference)))
    return float(_sklearn(name).roc_auc_score(data.truth, _probabilities(scores), multi_class="ovr"))


def _ordered(scores: Array) -> Array:
    """Replaces all scores with their ranks if any score is infinite, because scikit-learn rejects infinity."""
    if np.isfinite(scores).all():
        return scores
    return np.unique(scores, return_inverse=True)[1].reshape(scores.shape).astype(np.float64)


def _probabilities(scores: Array) -> Array:
    """Returns the softmax along axis 1. If the scores are already probabilities, they are only normalized."""
    # A model may end in Softmax. scikit-learn requires rows with sum 1, which half precision does not reach.
    if (scores >= 0).all() and np.allclose(scores.sum(axis=1), 1.0, atol=1e-3):
        return np.asarray(scores / scores.sum(axis=1, keepdims=True))
    highest = scores.max(axis=1, keepdims=True)
    # Skips the maximum, which may be infinite.
    exponentials = np.exp(np.subtract(scores, highest, out=np.zeros_like(scores), where=scores != highest))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


def _mcc(name: str, task: Task, prediction: Array, target: Array) -> float:
    """Computes the Matthews correlation coefficient (MCC); for multilabel, the mean over labels.

    The coefficient is 0/0 if all predictions or all labels are the same class; the result is then 0. It is NaN if there
    are no samples, or if a logit is NaN.
    """
    data = _scores(name, task, prediction, target)
    if not data.judgeable:
        return math.nan

    def measure(truth: Array, guess: Array) -> float:
        # If the same class is the only one in both, scikit-learn (1.5 and later) warns and returns 0, too.
        if (truth == truth[0]).all() or (guess == guess[0]).all():
            return 0.0
        return float(_sklearn(name).matthews_corrcoef(truth, guess))

    if data.one_of or data.two_classes:
        return measure(data.truth, data.guess)
    return float(np.mean([measure(*question) for question in zip(data.truth.T, data.guess.T, strict=True)]))


def _r2(name: str, task: Task, prediction: Array, target: Array) -> float:
    """Computes the coefficient of determination (R²), averaged over outputs."""
    _require(name, prediction, target, prediction.shape)
    truth, guess = (array.reshape(len(target), -1).astype(np.float64) for array in (target, prediction))
    if len(target) < 2 or has_nan(guess):
        return math.nan
    # The limit of growing errors; scikit-learn rejects infinity.
    if np.isinf(guess).any():
        return -math.inf
    return float(_sklearn(name).r2_score(truth, guess))


def _top_k(name: str, k: int, task: Task, prediction: Array, target: Array) -> float:
    """Computes top-k accuracy: the fraction of positions whose true class is among the k highest logits."""
    data = _scores(name, task, prediction, target)
    _require_classes(name, k, data.one_of)
    if not data.judgeable:
        return math.nan
    # For two classes, scikit-learn expects one score, that of the second class.
    if data.one_of == 2:
        return float((data.guess == data.truth).mean())
    # By default, scikit-learn infers the classes from the labels that occur, which may lack some.
    labels = np.arange(data.one_of)
    scores = _ordered(data.scores.astype(np.float64))
    return float(_sklearn(name).top_k_accuracy_score(data.truth, scores, k=k, labels=labels))


def _require_classes(name: str, k: int, classes: int) -> None:
    if k >= max(2, classes):
        raise InputError(
            f"The metric '{name}' checks whether the correct class is among the {k} highest scores, which "
            f"needs more than {k} classes; there are {classes or 'none'}. Choose a smaller one, such as "
            "'top2_accuracy'."
        )


def top_k_of(name: str) -> int | None:
    """Returns k for names such as "top5_accuracy" and "top_k_accuracy"; None for other names.

    >>> top_k_of("top3_accuracy"), top_k_of("top_k_accuracy"), top_k_of("accuracy")
    (3, 5, None)
    """
    match = _TOP_K.fullmatch(name)
    if match is None:
        return None
    return TOP_K if not match[1].isdecimal() else int(match[1])


WHOLE_METRICS: dict[str, Callable[[str, Task, Array, Array], float]] = {
    **{
        name + suffix: partial(_decided, function=f"{name}_score", average=average)
        for name in ("f1", "precision", "recall")
        for suffix, average in (
            ("", None),
            ("_macro", "macro"),
            ("_micro", "micro"),
            ("_weighted", "weighted"),
        )
    },
    "auroc": _auroc,
    "mcc": _mcc,
    "r2": _r2,
}
"""Metrics by name: functions `(name, task, predictions, targets) -> value`. For all of them, higher is better."""


def measure_of(name: str, task: Task) -> Callable[[Array, Array], float] | None:
    """Looks up a scikit-learn metric by name, e.g. "f1" or "top5_accuracy".

    Returns:
        A function `(predictions, targets) -> value`, called with the arrays of the whole dataset; None if the name is
        unknown.

    Raises:
        InputError: the metric is a top-k accuracy, and the task does not have more than k classes. If the number of
            classes is unknown, the returned function raises this error when it is called.
        MissingPackageError: scikit-learn is not installed.
    """
    # "top5_accuracy" is one of a family, so it is not in the table.
    k = top_k_of(name)
    if k is None and name not in WHOLE_METRICS:
        return None
    # A missing package is reported before training, not after the first epoch.
    _sklearn(name)
    if k is None:
        return partial(WHOLE_METRICS[name], name, task)
    # If the number of classes is known, a k that is too large is reported before training.
    if task.classes is not None:
        _require_classes(name, k, task.classes)
    return partial(_top_k, name, k, task)


def confusion_matrix(task: Task, prediction: Array, target: Array) -> Array:
    """Computes the confusion matrix, int64 [classes, classes]: rows are true classes, columns predicted classes.

    Raises:
        InputError: the shapes do not match, or a sample may have several correct classes (multilabel targets).
    """
    data = _scores("confusion_matrix", task, prediction, target)
    if not data.one_of and not data.two_classes:
        raise InputError(
            "A confusion matrix needs one correct class per sample, but these labels are independent "
            "(multilabel)."
        )
    classes = data.one_of or 2
    matrix = np.zeros((classes, classes), np.int64)
    # `matrix[truth, guess] += 1` would count duplicate pairs once.
    np.add.at(matrix, (data.truth, data.guess), 1)
    return matrix
