"""Finds the mistakes of a classifier on a dataset, and the images to show for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from onnxtrain.errors import InputError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.trainer._fit.state import TrainingState
from onnxtrain.trainer._metrics.probabilities import probabilities
from onnxtrain.trainer._show.mistakes import Mistake, plot_grid, worst_mistakes
from onnxtrain.trainer.data import ImageSource, Pass, Source
from onnxtrain.trainer.data._indexed import IndexedSource

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Images are shown in this size, at most.
_SIDE = 320


def plot_mistakes(state: TrainingState, data: Source, count: int, names: Sequence[str] | None) -> Figure:
    """Plots the samples that a classifier is most wrong about.

    Args:
        state: the trainer's state.
        data: the dataset.
        count: number of mistakes to show.
        names: names of the classes; None for their indices.

    Raises:
        InputError: the run is not a classifier with one class per sample, or the data is no images.
    """
    if not isinstance(data, IndexedSource):
        raise InputError(
            "Plotting mistakes needs data with random access: arrays, a dataset or a folder of images."
        )
    scores, labels = [], []
    with state.averaged():
        for step in state.run.evaluate(data.read(Pass())):
            prediction, target = state.metric_arrays(step)
            scores.append(prediction.copy())
            labels.append(target.copy())
    probability = _probabilities(state, np.concatenate(scores))
    true = _classes(np.concatenate(labels), probability.shape[1])
    mistakes, wrong = worst_mistakes(probability, true, count)
    # Rows of the predictions are the readable files.
    kept = data.kept if isinstance(data, ImageSource) else np.arange(data.samples)
    images = _images(data, kept, mistakes)
    title = f"{wrong:,} of {len(true):,} images are assigned to a wrong class"
    shown = f"; the {len(mistakes)} worst" if wrong > len(mistakes) else ""
    texts = list(names or ())
    texts += map(str, range(len(texts), probability.shape[1]))
    return plot_grid(mistakes, images, texts, title + shown)


def _probabilities(state: TrainingState, scores: Array) -> Array:
    """Returns the probability of each class, [samples, classes].

    Raises:
        InputError: the loss does not define probabilities, or samples have several labels.
    """
    result = probabilities(state.settings.loss, scores)
    if result is not None and result.ndim == 2 and result.shape[1] == 1:
        result = result[:, 0]
    if result is not None and result.ndim == 1:
        return np.stack([1 - result, result], axis=1)
    if result is None or result.ndim != 2:
        raise InputError(
            f"Plotting mistakes: the run has the loss {state.settings.loss or 'of the model'} and predictions of shape "
            f"{list(scores.shape)}, which are not one class per sample."
        )
    return result


def _classes(targets: Array, count: int) -> Array:
    """Returns the class index of each sample from indices, from 0 and 1, or from probabilities, [samples]."""
    if targets.ndim == 2 and targets.shape[1] == count and count > 1:
        return np.asarray(targets.argmax(axis=1))
    if targets.ndim == 1 or (targets.ndim == 2 and targets.shape[1] == 1):
        return np.rint(targets.reshape(-1)).astype(np.int64)
    raise InputError(
        f"Plotting mistakes: the targets of shape {list(targets.shape)} are not one class per sample."
    )


def _images(data: IndexedSource, kept: Array, mistakes: Sequence[Mistake]) -> list[Array]:
    if isinstance(data, ImageSource):
        folder = data.images.folder
        images = []
        for mistake in mistakes:
            image = folder.open(int(kept[mistake.sample]))
            image.thumbnail((_SIDE, _SIDE))
            images.append(np.asarray(image))
        return images
    arrays = [
        next(iter(data.take(np.array([mistake.sample])).read(Pass())))[0][0].copy() for mistake in mistakes
    ]
    return [_displayed(array) for array in arrays]


def _displayed(array: Array) -> Array:
    """Returns an input of the model as an image, [height, width] or [height, width, 3], from 0 to 1.

    Raises:
        InputError: the input has another shape.
    """
    image = array.astype(np.float32)
    if image.ndim == 3 and image.shape[0] in (1, 3):
        image = np.moveaxis(image, 0, -1)
    if image.ndim == 3 and image.shape[-1] == 1:
        image = image[..., 0]
    if image.ndim != 2 and not (image.ndim == 3 and image.shape[-1] == 3):
        raise InputError(
            f"Plotting mistakes: the inputs of shape {list(array.shape)} are not images: [channels, height, width] or "
            "[height, width, channels] with 1 or 3 channels, or [height, width]."
        )
    # Normalized pixels have any range.
    low, high = float(image.min()), float(image.max())
    return (image - low) / (high - low if high > low else 1.0)
