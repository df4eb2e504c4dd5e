"""Weights classes in the loss, so that frequent classes do not outweigh rare ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from onnxtrain._words import argument
from onnxtrain.errors import InputError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.runtime.store import require_unmasked
from onnxtrain.trainer.data._indexed import IndexedSource
from onnxtrain.trainer.data._layout import Layout
from onnxtrain.trainer.data._source import Pass, Source
from onnxtrain.trainer.data._wrapped import WrappedSource

ClassWeights = Any
"""A mapping from class to weight, one weight per class, or "balanced"."""


def balanced_weights(labels: Array, classes: int, sample_weight: Array | None = None) -> Array:
    """Computes balanced class weights, like scikit-learn's `compute_class_weight("balanced", ...)`.

    The weight of class c is n / (k * n_c): n is the number of samples, n_c the number of samples of class c, and k the
    number of classes that occur. With sample weights, n and n_c are sums of weights. Classes that do not occur have
    weight 1.

    Args:
        labels: integers in [0, classes), [samples].
        classes: number of classes.
        sample_weight: a weight for each sample, [samples]; None for weights of 1.

    >>> balanced_weights(np.array([0, 0, 0, 1]), 3).round(2)
    array([0.67, 2.  , 1.  ])
    """
    counts = np.bincount(labels, sample_weight, classes)
    occurs = counts > 0
    # 1 instead of 0 only avoids the warning of a division that `where` discards.
    weights = counts.sum() / (np.count_nonzero(occurs) * np.where(occurs, counts, 1))
    return np.where(occurs, weights, 1.0)


def require_one_label(layout: Layout, purpose: str) -> InputSpec:
    """Checks that the model's target is one class label or one binary value per sample; returns its specification.

    Args:
        layout: inputs and targets of the model.
        purpose: beginning of the error message, e.g. "class_weight='balanced'".

    Raises:
        InputError: the model has no target, or a different kind of target.
    """
    spec = layout.targets[0] if layout.targets else None
    shape = None if spec is None else spec.shape
    # Binary logits with one output have targets [samples, 1] or [samples].
    single = shape is not None and (
        len(shape) == 1 or (len(shape) == 2 and shape[1] == 1 and spec is not None and not spec.class_labels)
    )
    if spec is None or not single:
        received = (
            "has no target" if spec is None else f"has the target '{spec.name}' of shape {_shown(shape)}"
        )
        raise InputError(f"{purpose} needs one class label per sample, but the model {received}.")
    return spec


def _shown(shape: tuple[Any, ...] | None) -> str:
    return "unknown rank" if shape is None else f"[{', '.join(str(size or '?') for size in shape)}]"


def read_labels(source: Source, purpose: str) -> Array:
    """Reads the class labels of all samples, int64 [samples].

    Args:
        source: data with random access.
        purpose: beginning of error messages, e.g. "class_weight='balanced'".

    Raises:
        InputError: the data is a stream, or does not have one class label per sample.
    """
    spec = require_one_label(source.layout, purpose)
    if not isinstance(source, IndexedSource):
        raise InputError(
            f"{purpose} needs the labels of all samples before training, which a stream of batches does not provide. "
            "Pass arrays, a frame or a dataset."
        )
    # Binary targets may be a column.
    labels = source.first_target().reshape(-1)
    if labels.dtype.kind not in "iufb" or (spec.class_labels is None and not np.isin(labels, (0, 1)).all()):
        raise InputError(f"{purpose} needs class labels, but the target '{spec.name}' contains other values.")
    return labels.astype(np.int64)


def chosen_weights(weights: ClassWeights, source: Source) -> Array:
    """Converts the `class_weight` argument to an array with the weight of each class, float64 [classes].

    Args:
        weights: "balanced", a mapping from class index to weight, or one weight per class.
        source: training data.

    Raises:
        InputError: a class does not exist, a weight is negative or not finite, or the labels are unknown.
    """
    spec = require_one_label(source.layout, argument("class_weight"))
    count = 2 if spec.class_labels is None else spec.class_labels.count
    if isinstance(weights, str):
        if weights != "balanced":
            raise InputError(f"class_weight must be 'balanced', a dict or an array, received {weights!r}.")
        return _balanced(source, spec, count)
    if isinstance(weights, Mapping):
        # Only the command line and the estimators know names of classes, not the trainer.
        if not all(isinstance(key, int | np.integer) and key >= 0 for key in weights):
            raise InputError(f"class_weight should have class indices as keys, received {list(weights)}.")
        array = np.ones(count or max(weights, default=0) + 1)
        if beyond := [int(key) for key in weights if key >= len(array)]:
            raise InputError(
                f"class_weight names the classes {beyond}, but the classes are 0 to {len(array) - 1}."
            )
        for key, value in weights.items():
            array[int(key)] = value
    else:
        require_unmasked(argument("class_weight"), weights)
        array = np.asarray(weights, np.float64)
        if array.ndim != 1 or (count is not None and len(array) != count):
            raise InputError(
                f"class_weight has shape {list(array.shape)}; pass one weight for each of the "
                f"{'' if count is None else f'{count} '}classes."
            )
    if not (np.isfinite(array) & (array >= 0)).all():
        # A negative weight would maximize the loss of a class.
        raise InputError(f"class_weight should be finite and non-negative, received {array.tolist()}.")
    return array


def _balanced(source: Source, spec: InputSpec, count: int | None) -> Array:
    """Computes balanced class weights, float64 [classes], from the labels and sample weights of a source.

    Samples whose label is the target's `ignore_index` are skipped.

    Args:
        source: training data.
        spec: specification of the target.
        count: number of classes; None for the largest label plus 1.

    Raises:
        InputError: the source is a stream, its targets are not class labels, or all labels are ignored.
    """
    labels = read_labels(source, argument("class_weight", "balanced"))
    counted = np.ones(len(labels), bool)
    if spec.class_labels is not None and spec.class_labels.ignore_index is not None:
        counted = labels != spec.class_labels.ignore_index
    assert isinstance(source, IndexedSource)
    sample_weight = source.sample_weights()
    labels = labels[counted]
    if not len(labels):
        raise InputError(f"{argument('class_weight', 'balanced')}: all labels of the data are ignored.")
    of_sample = None if sample_weight is None else sample_weight[counted]
    return balanced_weights(labels, count or int(labels.max()) + 1, of_sample)


class ClassWeightedSource(WrappedSource):
    """Wraps a source, and multiplies the weight of each sample by the weight of its class.

    Args:
        source: training data.
        weights: weight of each class, float64 [classes]; other labels, such as `ignore_index`, have weight 1.
    """

    def __init__(self, source: Source, weights: Array) -> None:
        super().__init__(source)
        self.weights = weights

    @property
    def weighted(self) -> bool:
        """True: each sample has the weight of its class."""
        return True

    def last(self) -> list[Array] | None:
        """Returns the incomplete last batch; None if there is none."""
        batch = self._source.last()
        return None if batch is None else self._weigh(batch)

    def read(self, epoch: Pass, start: int = 0) -> Iterator[list[Array]]:
        """Yields the batches of an epoch, each with its sample weights as the last array."""
        # The layout has weights by now, so data without weights yields weights of 1.
        return (self._weigh(batch) if batch else [] for batch in self._source.read(epoch, start))

    def _weigh(self, arrays: list[Array]) -> list[Array]:
        *others, weights = arrays
        labels = others[len(self.layout.inputs)].reshape(-1).astype(np.int64)
        known = (labels >= 0) & (labels < len(self.weights))
        of_class = np.where(known, self.weights[np.where(known, labels, 0)], 1.0)
        return [*others, (weights * of_class).astype(weights.dtype)]
