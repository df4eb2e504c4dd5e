"""Prints text verbatim on the terminal with rich."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from onnxtrain._printable import printable


class PlainConsole(Console):
    """A console for text that quotes external names: escapes control characters, and interprets no markup.

    This applies to all strings, including those in table cells and titles. For styled text, use :func:`styled` or a
    `style` argument.

    Args:
        stderr: True to print to standard error.
        width: width in columns. Default: the width of the terminal.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Returns a string as a `Text`; rich calls this for every string that it prints."""
        return super().render_str(printable(text), **settings)


def styled(text: str, style: str) -> Text:
    """Returns a text with a single style, e.g. "bold", and control characters escaped."""
    return Text(printable(text), style)
