"""Plots a training run with matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onnxtrain._printable import printable
from onnxtrain.trainer._optional import optional

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e8ec"
TRAIN, VALIDATION = "#9db8d9", "#1d5fa8"
STYLE: dict[Any, Any] = {
    "figure.facecolor": "white",
    "font.family": "sans-serif",
    "font.size": 10.5,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.12,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
}
"""matplotlib's rcParams for all figures."""

_COLUMNS = 3


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty matplotlib figure that notebooks display and that opens no window.

    Args:
        width: width in inches.
        height: height in inches.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    figures = optional("matplotlib.figure", "A figure", "matplotlib, or 'onnxtrain[plots]'")

    # pyplot would register the figure with a window system and keep it in memory. Without pyplot, notebooks display a
    # figure only by this method.
    class Shown(figures.Figure):  # type: ignore[misc, name-defined]
        """Figure with a PNG representation for notebooks."""

        def _repr_png_(self) -> bytes:
            image = io.BytesIO()
            self.savefig(image, format="png")
            return image.getvalue()

    # Shown in repr() and error messages.
    Shown.__name__ = "Figure"
    return Shown(figsize=(width, height), dpi=110, layout="constrained")


def curves(axes: Any, title: str, lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
    """Plots values over the epochs.

    Args:
        axes: matplotlib axes to plot on.
        title: title of the axes.
        lines: (epochs, values) by label; the line with the label "validation" is emphasized.
    """
    for label, (epochs, values) in lines.items():
        color = VALIDATION if label == "validation" or len(lines) == 1 else TRAIN
        # A line through a single point would be invisible.
        marker = "o" if len(epochs) == 1 else ""
        axes.plot(epochs, values, color=color, linewidth=2, marker=marker, label=label)
    epochs = [epoch for some, _ in lines.values() for epoch in some]
    # Dollar signs in a name are not a formula.
    axes.set_title(printable(title), parse_math=False)
    axes.set_xlabel("epoch")
    # matplotlib warns of equal limits.
    axes.set_xlim(min(epochs), max(max(epochs), min(epochs) + 1))
    axes.grid(axis="x", visible=False)
    axes.xaxis.get_major_locator().set_params(integer=True)


def plot_epochs(epochs: Sequence[Mapping[str, float]], keys: Sequence[str]) -> Figure:
    """Plots one panel per key, with its training and validation values over the epochs."""
    mpl = optional("matplotlib", "A figure", "matplotlib, or 'onnxtrain[plots]'")
    with mpl.rc_context(STYLE):
        columns = min(len(keys), _COLUMNS)
        rows = -(-len(keys) // columns)
        figure = new_figure(4.8 * columns, 3.9 * rows)
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in panels[len(keys) :]:
            axes.remove()
        for axes, key in zip(panels, keys, strict=False):
            lines = {}
            for label, name in (("training", key), ("validation", f"val_{key}")):
                recorded = [epoch for epoch in epochs if name in epoch]
                if recorded:
                    lines[label] = [epoch["epoch"] for epoch in recorded], [epoch[name] for epoch in recorded]
            curves(axes, key.replace("_", " "), lines)
            if len(lines) > 1:
                axes.legend(frameon=False, labelcolor=INK)
    return figure


def plot_range(rates: Sequence[float], losses: Sequence[float], suggestion: float | None) -> Figure:
    """Plots the loss against the learning rate, on a logarithmic axis."""
    mpl = optional("matplotlib", "A figure", "matplotlib, or 'onnxtrain[plots]'")
    with mpl.rc_context(STYLE):
        figure = new_figure(6.4, 4.2)
        axes = figure.subplots()
        axes.plot(rates, losses, color=VALIDATION, linewidth=2, label="smoothed loss")
        axes.set_xscale("log")
        axes.set_title("loss")
        axes.set_xlabel("learning rate")
        if suggestion is not None:
            axes.axvline(suggestion, color=MUTED, linestyle="--", label=f"suggestion: {suggestion:.2g}")
            axes.legend(frameon=False, labelcolor=INK)
    return figure
