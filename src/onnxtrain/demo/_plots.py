"""Draws the demo's figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from onnxtrain.trainer._show.plots import GRID, INK, STYLE, VALIDATION, curves

if TYPE_CHECKING:
    from onnxtrain.trainer import History


def plot_history(history: History, path: Path) -> None:
    """Writes a PNG of loss and accuracy over the epochs."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.9), dpi=160, layout="constrained")
        loss_axes, accuracy_axes = figure.subplots(1, 2)
        epochs = [int(epoch) for epoch in history["epoch"]]
        lines = {"training": (epochs, history["loss"]), "validation": (epochs, history["val_loss"])}
        curves(loss_axes, "Cross-entropy", lines)
        # The loss falls by orders of magnitude.
        loss_axes.set_yscale("log")
        percent = [[100 * value for value in history[key]] for key in ("accuracy", "val_accuracy")]
        lines = {"training": (epochs, percent[0]), "validation": (epochs, percent[1])}
        curves(accuracy_axes, "Accuracy (%)", lines)
        # The axis ignores the first tenth of the epochs, whose low accuracy would flatten the rest of the curve.
        low = min(percent[1][len(epochs) // 10 :])
        accuracy_axes.set_ylim(max(0.0, min(90.0, low) - 2), 100.5)
        accuracy_axes.legend(loc="lower right", frameon=False, labelcolor=INK)
        figure.savefig(path)


def plot_confusion(matrix: npt.NDArray[np.int64], labels: Sequence[str], path: Path) -> None:
    """Writes a PNG of a confusion matrix.

    Args:
        matrix: [classes, classes]; rows are true classes, columns are predicted classes.
        labels: names of the classes.
        path: file to write.
    """
    import matplotlib as mpl
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    total, right = int(matrix.sum()), int(np.trace(matrix))
    # The row of a class without samples stays 0.
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    colors = LinearSegmentedColormap.from_list("share", ["#ffffff", "#cfe0f3", VALIDATION])
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(6.2, 6.0), dpi=160, layout="constrained")
        axes = figure.subplots()
        # The square root makes the few wrong predictions visible next to the diagonal.
        axes.imshow(np.sqrt(shares), cmap=colors, vmin=0, vmax=1)
        for row, column in np.argwhere(matrix > 0):
            on_diagonal = row == column
            # White text on dark cells; red for mistakes.
            color = "white" if shares[row, column] > 0.4 else "#b3261e"
            weight = "normal" if on_diagonal else "bold"
            count = str(matrix[row, column])
            axes.text(column, row, count, ha="center", va="center", color=color, fontweight=weight)
        axes.set_xticks(range(len(labels)), labels)
        axes.set_yticks(range(len(labels)), labels)
        # Minor ticks between the cells draw the grid; major ticks have the labels.
        axes.set_xticks(np.arange(len(labels) - 1) + 0.5, minor=True)
        axes.set_yticks(np.arange(len(labels) - 1) + 0.5, minor=True)
        axes.grid(which="minor", color=GRID, linewidth=0.8)
        axes.tick_params(which="minor", length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("predicted digit")
        axes.set_ylabel("true digit")
        axes.set_title(f"{right} of {total} test images right ({right / total:.1%})")
        figure.savefig(path)
