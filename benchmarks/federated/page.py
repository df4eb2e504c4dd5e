"""Prints the tables of notes/many-devices.md, from the results of simulate.py and server.py.

Usage: python page.py [--write] [--plot notes/images/many-devices.png]
`--write` puts the tables into the page, each between the comments of its name.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "common"))

from page_tables import lines, write_tables

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[2] / "notes" / "many-devices.md"
RUNS = {
    "skewed, a fifth does not answer": "simulation.json",
    "skewed, all answer": "simulation-all-answer.json",
    "all labels on each client, a fifth does not answer": "simulation-even.json",
}
"""File of each simulation."""
SHOWN = (0, 1, 5, 10, 20, 30, 40, 50, 60)


def read(name: str) -> Any:
    """Reads a file of results."""
    return json.loads((RESULTS / name).read_text())


def accuracies() -> str:
    """Accuracy on the server's samples after some rounds, in percent."""
    rows = [
        [name, *(f"{100 * read(file)['accuracy'][str(n)]:.1f}" for n in SHOWN)] for name, file in RUNS.items()
    ]
    return lines(["clients", *map(str, SHOWN)], rows)


def rounds() -> str:
    """Messages, bytes and seconds of a round, in the mean."""
    rows = []
    for name, file in RUNS.items():
        noted = read(file)["rounds"]

        def mean(key: str, noted: list[dict[str, float]] = noted) -> float:
            return statistics.mean(one[key] for one in noted)

        rows.append(
            [
                name,
                *(f"{mean(key):.1f}" for key in ("asked", "answered", "dropped", "late")),
                *(f"{mean(key):,.0f}" for key in ("bytes_down", "bytes_up")),
                f"{1000 * mean('server_s'):.0f} ms",
            ]
        )
    head = ["clients", "asked", "answered", "dropped out", "late", "bytes to clients", "bytes back", "server"]
    return lines(head, rows)


def servers() -> str:
    """Seconds and memory of the server by answers and their size."""
    rows = [
        [
            f"{row['parameters']:,}",
            f"{row['answers']:,}",
            f"{row['bytes_up'] / 1e6:,.1f} MB",
            f"{row['server_s']:.2f} s",
            f"{row['memory'] / 1e6:,.0f} MB",
        ]
        for row in read("server.json")
    ]
    return lines(["parameters", "answers", "bytes back", "processor", "memory"], rows)


def tables() -> dict[str, str]:
    """Makes all tables of the page by name."""
    return {"accuracies": accuracies(), "rounds": rounds(), "servers": servers()}


def plot(path: Path) -> None:
    """Draws accuracy over the rounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 3.8))
    for name, file in RUNS.items():
        values = read(file)["accuracy"]
        axes.plot([int(n) for n in values], [100 * v for v in values.values()], label=name, linewidth=1.5)
    axes.set_xlabel("round")
    axes.set_ylabel("accuracy on the server's samples, %")
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    write_tables(PAGE, tables(), plot)
