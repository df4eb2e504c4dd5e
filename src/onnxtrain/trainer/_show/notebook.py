"""Shows a fit in a notebook: a progress bar, and a table of the epochs."""

from __future__ import annotations

import html
import importlib
import sys
import time
from typing import Any

from onnxtrain._printable import printable
from onnxtrain.trainer._show.report import Report, format_value
from onnxtrain.trainer._show.time_left import TimeLeft

# Seconds between two updates, each of which is a message to the browser.
_SECONDS = 0.1

# Rows of the table, which shows the last epochs: each update sends all rows again.
_ROWS = 50


def in_notebook() -> bool:
    """True if this process runs the cells of a notebook."""
    # A notebook's kernel has already imported IPython; importing it here would slow down scripts.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    kind = type(shell)
    return kind.__name__ == "ZMQInteractiveShell" or kind.__module__.startswith("google.colab")


class NotebookReport(Report):
    """Shows a fit as the output of one cell, updated in place. Requires IPython, but not ipywidgets."""

    shows_steps = True

    def __init__(self) -> None:
        self._display = importlib.import_module("IPython.display")
        self._handle: Any = None
        self._title = self._values = ""
        self._total = self._done = 0
        self._rows: list[dict[str, float]] = []
        self._notes: list[str] = []
        self._shown = 0.0
        self._left = TimeLeft()

    def __enter__(self) -> NotebookReport:
        # A display with an id is updated in place; printing would add a bar for each update.
        self._handle = self._display.display(self._display.HTML(self._text()), display_id=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._show(now=True)

    def begin_epoch(self, epoch: int, epochs: int, batches: int | None, done: int) -> None:
        """Restarts the bar."""
        self._title, self._values = f"epoch {epoch}/{epochs}", ""
        self._total, self._done = batches or 0, done
        self._left.begin_epoch(epoch, epochs, batches, done)
        self._show()

    def step(self, batches: int, values: dict[str, float], rate: float) -> None:
        """Advances the bar."""
        self._done += batches
        self._left.step(batches)
        texts = [*(f"{key} {format_value(value)}" for key, value in values.items()), f"{rate:,.0f} samples/s"]
        self._values = "  ".join(filter(None, [*texts, self._left.text()]))
        self._show()

    def end_epoch(self, epoch: int, epochs: int, record: dict[str, float], rate: float) -> None:
        """Adds a row to the table."""
        self._rows = [*self._rows[1 - _ROWS :], record]
        self._show()

    def note(self, text: str) -> None:
        """Shows a sentence after the table."""
        self._notes.append(text)
        self._show(now=True)

    def _show(self, *, now: bool = False) -> None:
        if now or time.monotonic() - self._shown >= _SECONDS:
            self._shown = time.monotonic()
            self._handle.update(self._display.HTML(self._text()))

    def _text(self) -> str:
        keys = list(dict.fromkeys(key for row in self._rows for key in row))
        head = "".join(f"<th>{_escaped(key)}</th>" for key in keys)
        body = "".join(f"<tr>{''.join(_cell(row, key) for key in keys)}</tr>" for row in self._rows)
        bar = f'<progress value="{self._done}" max="{max(1, self._total)}"></progress>'
        return (
            f"<div>{_escaped(self._title)} {bar} {self._done}/{self._total or '?'} {_escaped(self._values)}</div>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            + "".join(f"<p>{_escaped(text)}</p>" for text in self._notes)
        )


def _cell(row: dict[str, float], key: str) -> str:
    if key not in row:
        return "<td></td>"
    return f"<td>{int(row[key]) if key == 'epoch' else format_value(row[key])}</td>"


def _escaped(text: str) -> str:
    return html.escape(printable(text))
