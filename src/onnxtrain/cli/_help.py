"""Writes `--help` of a command."""

from __future__ import annotations

from copy import copy
from typing import Any

from typer.core import TyperCommand


class CommandWithSwitches(TyperCommand):
    """A command whose switches have a second spelling, `--no-recompute`, that `--help` leaves out."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help without the second spellings, which are one rule and would take a column of every table."""
        shown = copy(self)
        shown.params = [copy(parameter) for parameter in self.params]
        for parameter in shown.params:
            parameter.secondary_opts = []
        TyperCommand.format_help(shown, ctx, formatter)
