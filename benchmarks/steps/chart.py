"""The bar chart of the results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["write_chart"]

HIGHEST = 3.0


def write_chart(path: Path, ratios: Mapping[str, Mapping[str, float]]) -> None:
    """Draws a group of bars for each case, a bar for each engine; 1 is the best of PyTorch.

    Args:
        path: of the image.
        ratios: by engine and case. Bars above 3 are cut off and labelled.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys(case for row in ratios.values() for case in row))
    height = 0.8 / max(1, len(ratios))
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.5 * len(cases)))
    for index, (engine, row) in enumerate(ratios.items()):
        places = [cases.index(case) + (index + 0.5) * height - 0.4 for case in row]
        axes.barh(places, [min(v, HIGHEST) for v in row.values()], height, label=engine)
        for place, value in zip(places, row.values(), strict=True):
            if value > HIGHEST:
                axes.text(HIGHEST, place, f" {value:.1f}", va="center", fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    axes.set_xlim(0, HIGHEST * 1.05)
    axes.set_xlabel("time of one step; 1 = the best of PyTorch eager and torch.compile, in either layout")
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
