"""Plots the images that a classifier is most wrong about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from onnxtrain._printable import printable
from onnxtrain.runtime.dtypes import Array
from onnxtrain.trainer._optional import optional
from onnxtrain.trainer._show.plots import INK, MUTED, STYLE, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 4
_LONGEST = 22
_WRONG = "#b3261e"


class Mistake(NamedTuple):
    """A sample that a classifier assigns to a wrong class.

    Attributes:
        sample: index of the sample.
        true: index of its class.
        predicted: index of the predicted class.
        confidence: probability of the predicted class.
    """

    sample: int
    true: int
    predicted: int
    confidence: float


def worst_mistakes(probability: Array, labels: Array, count: int) -> tuple[list[Mistake], int]:
    """Returns the mistakes with the least probability of the true class, and the number of all mistakes.

    Args:
        probability: probability of each class, [samples, classes].
        labels: true classes, integers [samples].
        count: number of mistakes to return.

    >>> worst_mistakes(np.array([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]]), np.array([1, 1, 0]), 1)
    ([Mistake(sample=0, true=1, predicted=0, confidence=0.9)], 2)
    """
    predicted = probability.argmax(axis=1)
    wrong = np.flatnonzero(predicted != labels)
    # Stable, so that equal probabilities keep the order of the samples.
    worst = wrong[np.argsort(probability[wrong, labels[wrong]], kind="stable")][:count]
    listed = [
        Mistake(int(i), int(labels[i]), int(predicted[i]), float(probability[i, predicted[i]])) for i in worst
    ]
    return listed, len(wrong)


def plot_grid(
    mistakes: Sequence[Mistake], images: Sequence[Array], names: Sequence[str], title: str
) -> Figure:
    """Plots images in a grid, each with its true and predicted class and the confidence.

    Args:
        mistakes: the mistakes.
        images: an image for each mistake, [height, width] or [height, width, 3 or 4].
        names: names of the classes.
        title: title of the figure.
    """
    mpl = optional("matplotlib", "A figure", "matplotlib, or 'onnxtrain[plots]'")
    columns = min(_COLUMNS, max(len(mistakes), 1))
    rows = -(-len(mistakes) // columns)
    # Rows as high as most images, which may be landscapes or portraits.
    ratio = float(np.median([image.shape[0] / image.shape[1] for image in images])) if images else 1.0
    with mpl.rc_context(STYLE):
        figure = new_figure(2.4 * max(columns, 2), 0.9 + (2.2 * min(max(ratio, 0.4), 2) + 0.6) * rows)
        # Dollar signs in a name are not a formula.
        figure.suptitle(printable(title), color=INK, fontsize=12, fontweight="bold", parse_math=False)
        if not mistakes:
            return figure
        panels: Any = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in panels[len(mistakes) :]:
            axes.remove()
        for axes, mistake, image in zip(panels, mistakes, images, strict=False):
            axes.imshow(image, cmap="gray" if image.ndim == 2 else None)
            axes.set_axis_off()
            true, predicted = (_short(names[index]) for index in (mistake.true, mistake.predicted))
            axes.set_title(f"{true}\n", color=INK, fontsize=9.5, loc="center", pad=4, parse_math=False)
            axes.text(
                0.5,
                1.02,
                f"as {predicted}, {mistake.confidence:.0%}",
                color=_WRONG,
                fontsize=9,
                ha="center",
                va="bottom",
                transform=axes.transAxes,
                parse_math=False,
            )
        figure.supxlabel(
            "black: true class; red: predicted class and its probability", color=MUTED, fontsize=8.5
        )
    return figure


def _short(name: str) -> str:
    text = printable(name)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
