"""One figure for each series: what was known, what came, what was forecast."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from protocol import Windows

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e8ec"
LINES = {  # forecast -> color, width, style, z-order
    "seasonal-naive": ("#a9b4c0", 1.3, (0, (4, 2)), 2),
    # The three lie on each other: the widest at the bottom.
    "PyTorch, eager": ("#f8dfc8", 8.0, "-", 3),
    "ORTModule": ("#ec9a58", 4.2, "-", 4),
    "on the device": ("#1d5fa8", 1.5, "-", 5),
    "trained on co2": ("#ec9a58", 1.6, "-", 3),
    "personalised": ("#1d5fa8", 1.8, "-", 5),
}
STYLE = {
    "font.size": 10,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.axisbelow": True,
}


def plot_forecasts(windows: Windows, methods: dict[str, dict[str, np.ndarray]], path: Path) -> None:
    """Draws the test part, forecast horizon after horizon, behind the end of what came before."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 4.2), dpi=100, layout="constrained")
        axes = figure.subplots()
        starts, horizon = windows.starts("test"), windows.task.horizon
        shown = range(0, len(starts), horizon)
        times, values = windows.series.times, windows.series.values
        first, last = starts[0], starts[shown[-1]] + horizon
        history, truth = slice(first - windows.task.context, first + 1), slice(first, last)
        axes.plot(times[history], values[history], color=MUTED, linewidth=1.1, label="history")
        axes.plot(times[truth], values[truth], color=INK, linewidth=1.1, zorder=6, label="truth")
        for method, parts in methods.items():
            _draw(axes, method, times, [(starts[i], parts["test"][i]) for i in shown])
        for i in shown:
            axes.axvline(times[starts[i]], color=MUTED, linewidth=0.8, linestyle=":", zorder=1)
        step = "years" if windows.task.period == 11 else "months"
        axes.set_title(f"{windows.series.title}: {horizon} {step} ahead, from each dotted line")
        axes.set_ylabel(windows.series.unit)
        axes.set_xlim(times[first - windows.task.context], times[last - 1])
        figure.legend(loc="outside lower center", ncols=6, frameon=False, labelcolor=INK)
        figure.savefig(path)


def _draw(axes: Axes, method: str, times: np.ndarray, forecasts: list[tuple[int, np.ndarray]]) -> None:
    color, width, style, order = LINES[method]
    for index, (start, forecast) in enumerate(forecasts):
        axes.plot(
            times[start : start + len(forecast)],
            forecast,
            color=color,
            linewidth=width,
            linestyle=style,
            zorder=order,
            label=method if index == 0 else None,
        )
