"""Prints on the terminal with rich: every text as it is."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from onnxtrain._printable import printable


class PlainConsole(Console):
    """A console for texts that quote names of others: it escapes control characters, and knows no markup.

    Holds for all strings, also those in cells and titles of tables. What is styled by code is a `Text` of
    :func:`styled`, or has a `style` of its own.

    Args:
        stderr: True to print to standard error.
        width: width in columns; None for that of the terminal.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Returns a string as a `Text`; rich calls this for every string that it prints."""
        return super().render_str(printable(text), **settings)


def styled(text: str, style: str) -> Text:
    """Returns a text in one style, e.g. "bold", with control characters escaped."""
    return Text(printable(text), style)
