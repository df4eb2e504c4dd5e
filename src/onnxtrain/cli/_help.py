"""Writes `--help` of a command, and speaks in messages of the options that it has."""

from __future__ import annotations

from copy import copy
from itertools import pairwise
from typing import Any

from typer.core import TyperCommand

from onnxtrain._words import speaking
from onnxtrain.cli._shell_words import ShellWords

_TRUTH = frozenset({"true", "false", "yes", "no", "on", "off", "1", "0", "True", "False"})


class CommandWithSwitches(TyperCommand):
    """A command whose switches have a second spelling, `--no-recompute`, that `--help` leaves out."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command. Messages name its options."""
        with speaking(ShellWords(str(self.name), self._spellings())):
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parses the options. Says of a value behind a switch, such as `--json true`, that the switch takes none."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            before = [
                switch for switch, word in pairwise(given) if switch in self._switches() and word in _TRUTH
            ]
            # By its message: newer versions of typer have a copy of click of their own.
            if before and "unexpected extra argument" in str(getattr(error, "message", "")):
                off = self._switches()[before[0]]
                error.message = f"{before[0]} takes no value: it switches on, and {off} off."  # type: ignore[attr-defined]
            raise

    def _spellings(self) -> set[str]:
        return {text for parameter in self.params for text in (*parameter.opts, *parameter.secondary_opts)}

    def _switches(self) -> dict[str, str]:
        """Returns for each switch the spelling that switches it off, e.g. {"--json": "--no-json"}."""
        pairs = ((parameter.opts, parameter.secondary_opts) for parameter in self.params)
        return {text: off[0] for on, off in pairs if off for text in on}

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help without the second spellings, which are one rule and would take a column of every table."""
        shown = copy(self)
        shown.params = [copy(parameter) for parameter in self.params]
        for parameter in shown.params:
            parameter.secondary_opts = []
        TyperCommand.format_help(shown, ctx, formatter)
