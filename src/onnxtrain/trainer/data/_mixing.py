"""Augments batches by mixing pairs of samples: MixUp and CutMix, for `transform=` of a fit."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxtrain.errors import InputError
from onnxtrain.runtime.dtypes import Array


class _Mixing(ABC):
    """Base class for transforms that mix pairs of samples in a batch, and their targets in the same proportion.

    Args:
        alpha: parameter of the distribution Beta(alpha, alpha) of the proportion.
        classes: number of classes, to one-hot encode class labels; None for floating-point targets.
        probability: probability that a batch is mixed.
    """

    def __init__(self, alpha: float, classes: int | None, probability: float) -> None:
        name = type(self).__name__
        for argument, value, good in (
            ("alpha", alpha, "a positive number"),
            ("probability", probability, "a number between 0 and 1"),
        ):
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if (
                not number
                or value < 0
                or (argument == "alpha" and value == 0)
                or (argument != "alpha" and value > 1)
            ):
                raise InputError(f"{name}: {argument} must be {good}, received {value!r}.")
        self.alpha = float(alpha)
        self.classes = classes
        self.probability = float(probability)

    def __call__(self, inputs: Any, targets: Any, rng: np.random.Generator) -> tuple[Any, Any]:
        """Mixes a batch; called as the `transform` of :meth:`onnxtrain.Trainer.fit`."""
        soft = self._soft(targets)
        # Always drawn, so that later batches do not depend on whether this one is mixed.
        share, partner = float(rng.beta(self.alpha, self.alpha)), rng.permutation(len(soft))
        if rng.random() >= self.probability:
            return inputs, soft
        if isinstance(inputs, Mapping):
            raise InputError(
                f"{type(self).__name__} supports only models with one input, received "
                f"{', '.join(map(str, inputs))}."
            )
        mixed, share = self._mix(np.asarray(inputs), partner, share, rng)
        return mixed, soft * soft.dtype.type(share) + soft[partner] * soft.dtype.type(1 - share)

    @abstractmethod
    def _mix(
        self, inputs: Array, partner: Array, share: float, rng: np.random.Generator
    ) -> tuple[Array, float]:
        """Mixes the inputs of each sample with the inputs of its partner.

        Args:
            inputs: inputs of the batch, [samples, ...].
            partner: index of each sample's partner, [samples].
            share: fraction of the mixture that should come from the sample itself.
            rng: generator for other random choices.

        Returns:
            The mixed inputs, and the weight of the sample's own target.
        """

    def _soft(self, targets: Any) -> Array:
        """One-hot encodes class labels; returns floating-point targets unchanged."""
        # One-hot classes, binary targets and regression targets are all mixed the same way.
        array = np.asarray(targets)
        if array.dtype.kind == "f":
            return array
        if array.dtype.kind not in "iu" or array.ndim != 1 or self.classes is None:
            raise InputError(
                f"{type(self).__name__} needs floating-point targets, e.g. one-hot, or one class label per "
                f"sample and classes=NUMBER; received {array.dtype} of shape {list(array.shape)}, "
                f"classes={self.classes!r}."
            )
        if len(array) and not 0 <= array.min() <= array.max() < self.classes:
            raise InputError(
                f"{type(self).__name__}: the labels must be in [0, classes); received labels {array.min()} "
                f"to {array.max()}, classes={self.classes}."
            )
        one_hot: Array = np.eye(self.classes, dtype=np.float32)[array]
        return one_hot


class MixUp(_Mixing):
    """Transform for :meth:`Trainer.fit` that averages pairs of samples and their targets (Zhang et al. 2018).

    For each batch, l is drawn from Beta(alpha, alpha), and for each sample i a random partner j. The sample becomes x =
    l·x_i + (1 - l)·x_j, with the target t = l·t_i + (1 - l)·t_j. Class targets become probabilities: train with
    `CrossEntropyLoss(probabilities=True)` or `bce_with_logits`. Regression targets are averaged as well.

    Args:
        alpha: strength, e.g. 0.2; with larger values, more pairs are mixed in nearly equal parts.
        classes: number of classes, to one-hot encode class labels; None for floating-point targets.
        probability: probability that a batch is mixed.

    Raises:
        InputError: an argument is out of range.

    Example:
        >>> x, t = MixUp(alpha=1.0, classes=2)(np.float32([[0], [1]]), np.array([0, 1]), np.random.default_rng(3))
        >>> x.shape, t.sum(axis=1)
        ((2, 1), array([1., 1.], dtype=float32))
    """

    def __init__(self, alpha: float = 0.2, classes: int | None = None, probability: float = 1.0) -> None:
        super().__init__(alpha, classes, probability)

    def _mix(
        self, inputs: Array, partner: Array, share: float, rng: np.random.Generator
    ) -> tuple[Array, float]:
        # Images may be uint8, which would truncate the average.
        wide = inputs if inputs.dtype.kind == "f" else inputs.astype(np.float32)
        return wide * wide.dtype.type(share) + wide[partner] * wide.dtype.type(1 - share), share


class CutMix(_Mixing):
    """Transform for :meth:`Trainer.fit` that pastes a box from another image into each image (Yun et al. 2019).

    With l drawn from Beta(alpha, alpha) once per batch, the box has sqrt(1 - l) of the image's height and width, is
    centered at a random pixel, and is clipped at the border. Each target's weight is its image's share of the pixels.
    Train with `CrossEntropyLoss(probabilities=True)` or `bce_with_logits`.

    Args:
        alpha: strength; 1.0 draws l uniformly from [0, 1].
        classes: number of classes, to one-hot encode class labels; None for floating-point targets.
        probability: probability that a batch is mixed.

    Raises:
        InputError: an argument is out of range.

    Example:
        >>> images = np.float32([[[[0, 0], [0, 0]]], [[[1, 1], [1, 1]]]])
        >>> mixed, t = CutMix(classes=2)(images, np.array([0, 1]), np.random.default_rng(4))
        >>> bool((mixed.mean(axis=(1, 2, 3)) == t[:, 1]).all())  # of black and white images
        True
    """

    def __init__(self, alpha: float = 1.0, classes: int | None = None, probability: float = 1.0) -> None:
        super().__init__(alpha, classes, probability)

    def _mix(
        self, inputs: Array, partner: Array, share: float, rng: np.random.Generator
    ) -> tuple[Array, float]:
        if inputs.ndim < 3:
            raise InputError(
                "CutMix needs images of shape [batch, ..., height, width], received inputs of shape "
                f"{list(inputs.shape)}."
            )
        height, width = inputs.shape[-2:]
        ratio = math.sqrt(1 - share)
        # As in the authors' code, half of the box to each side, so that an odd box loses one pixel.
        spans = []
        for size in (height, width):
            half, center = int(size * ratio) // 2, int(rng.integers(size))
            spans.append(slice(max(center - half, 0), min(center + half, size)))
        # Copied, so that no pasted box is pasted again into a third image.
        mixed = inputs.copy()
        mixed[..., spans[0], spans[1]] = inputs[partner][..., spans[0], spans[1]]
        area = (spans[0].stop - spans[0].start) * (spans[1].stop - spans[1].start)
        return mixed, 1 - area / (height * width)
