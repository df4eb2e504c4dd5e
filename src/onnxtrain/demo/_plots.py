"""The demo's figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from onnxtrain.trainer import History

__all__ = ["plot_confusion", "plot_history"]

_INK, _MUTED, _GRID = "#1f2933", "#6b7785", "#e4e8ec"
_TRAIN, _VALIDATION = "#9db8d9", "#1d5fa8"
_STYLE: dict[Any, Any] = {
    "figure.facecolor": "white",
    "font.family": "sans-serif",
    "font.size": 10.5,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _MUTED,
    "axes.titlecolor": _INK,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": _INK,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.12,
    "axes.grid": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
}


def plot_history(history: History, path: Path) -> None:
    """Writes loss and accuracy over the epochs as a PNG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9.6, 3.9), dpi=160, layout="constrained")
        loss_axes, accuracy_axes = figure.subplots(1, 2)
        epochs = [int(epoch) for epoch in history["epoch"]]
        _curves(loss_axes, epochs, history["loss"], history["val_loss"], "Cross-entropy")
        loss_axes.set_yscale("log")
        percent = [[100 * value for value in history[key]] for key in ("accuracy", "val_accuracy")]
        _curves(accuracy_axes, epochs, percent[0], percent[1], "Accuracy (%)")
        low = min(percent[1][len(epochs) // 10 :])
        accuracy_axes.set_ylim(max(0.0, min(90.0, low) - 2), 100.5)
        accuracy_axes.legend(loc="lower right", frameon=False, labelcolor=_INK)
        figure.savefig(path)


def _curves(axes: Any, epochs: list[int], training: list[float], validation: list[float], title: str) -> None:
    axes.plot(epochs, training, color=_TRAIN, linewidth=2, label="training")
    axes.plot(epochs, validation, color=_VALIDATION, linewidth=2, label="validation")
    axes.set_title(title)
    axes.set_xlabel("epoch")
    axes.set_xlim(epochs[0], max(epochs[-1], epochs[0] + 1))
    axes.grid(axis="x", visible=False)
    axes.xaxis.get_major_locator().set_params(integer=True)


def plot_confusion(matrix: npt.NDArray[np.int64], labels: Sequence[str], path: Path) -> None:
    """Writes a confusion matrix as a PNG.

    Args:
        matrix: [classes, classes], rows are true classes, columns predicted ones.
        labels: names of the classes.
        path: the file.
    """
    import matplotlib as mpl
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    total, right = int(matrix.sum()), int(np.trace(matrix))
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    colors = LinearSegmentedColormap.from_list("share", ["#ffffff", "#cfe0f3", _VALIDATION])
    with mpl.rc_context({**_STYLE, "axes.grid": False}):
        figure = Figure(figsize=(6.2, 6.0), dpi=160, layout="constrained")
        axes = figure.subplots()
        axes.imshow(np.sqrt(shares), cmap=colors, vmin=0, vmax=1)
        for row, column in np.argwhere(matrix > 0):
            on_diagonal = row == column
            color = "white" if shares[row, column] > 0.4 else "#b3261e"
            weight = "normal" if on_diagonal else "bold"
            count = str(matrix[row, column])
            axes.text(column, row, count, ha="center", va="center", color=color, fontweight=weight)
        axes.set_xticks(range(len(labels)), labels)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_xticks(np.arange(len(labels) - 1) + 0.5, minor=True)
        axes.set_yticks(np.arange(len(labels) - 1) + 0.5, minor=True)
        axes.grid(which="minor", color=_GRID, linewidth=0.8)
        axes.tick_params(which="minor", length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("predicted digit")
        axes.set_ylabel("true digit")
        axes.set_title(f"{right} of {total} test images right ({right / total:.1%})")
        figure.savefig(path)
