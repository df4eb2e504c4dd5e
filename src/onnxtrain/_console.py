"""Prints text verbatim on the terminal with rich."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from onnxtrain._printable import printable


class PlainConsole(Console):
    """A rich console that prints strings verbatim: it escapes control characters and interprets no markup.

    Names from external files are therefore safe to print, even in table cells and titles. For styled text, use
    :func:`styled` or a `style` argument.

    Args:
        stderr: True to print to standard error.
        width: width in columns. Default: the width of the terminal.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Converts a string to a `Text` with control characters escaped. rich calls this for every string."""
        return super().render_str(printable(text), **settings)


def styled(text: str, style: str) -> Text:
    """Returns `text` in one style, e.g. "bold", with control characters escaped."""
    return Text(printable(text), style)
