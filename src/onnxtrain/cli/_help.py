"""Formats the help of commands, and makes their messages refer to options instead of Python arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import fields
from itertools import pairwise
from typing import Any

from typer.core import TyperCommand

from onnxtrain._names import settings_by_name
from onnxtrain._words import speaking
from onnxtrain.cli._shell_words import ShellWords

_TRUTH = frozenset({"true", "false", "yes", "no", "on", "off", "1", "0", "True", "False"})


def full_help(parameter: Any) -> str:
    """Returns the help text of an option or argument.

    The help text of `--loss-option` and `--optimizer-option` lists the settings of each loss or optimizer. The classes
    of losses and optimizers are imported only here, so that commands start fast.
    """
    text = str(parameter.help or "")
    try:
        if parameter.name == "loss_option":
            from onnxtrain.losses import LOSSES

            return f"{text} Settings: {_settings(LOSSES, {'reduction'})}; reduction of all."
        if parameter.name == "optimizer_option":
            from onnxtrain.optimizers import OPTIMIZERS

            # Weight decay and clipping have options of their own; groups can only be set in Python.
            others = {"weight_decay", "clip_grad", "groups"}
            return f"{text} Settings: {_settings(OPTIMIZERS, others)}."
    except ModuleNotFoundError:
        # Without onnx, the help is shown without the settings.
        return text
    return text


def _settings(kinds: Mapping[str, type[Any]], others: Collection[str]) -> str:
    """Lists the settings of each class, except those in `others`, e.g. "focal: alpha, gamma; huber: delta"."""
    named = {
        name: [field.name for field in fields(kind) if field.name not in others]
        for name, kind in kinds.items()
    }
    return settings_by_name({name: ", ".join(settings) for name, settings in named.items() if settings})


class CommandWithSwitches(TyperCommand):
    """A command whose help omits the opposite spellings of switches, e.g. `--no-recompute`."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command, and makes messages refer to its options instead of Python arguments."""
        with speaking(ShellWords(str(self.name), self._spellings())):
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parses the options.

        If a value follows a switch (`--json true`), the error message explains that the switch takes no value.
        """
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            before = [
                switch for switch, word in pairwise(given) if switch in self._switches() and word in _TRUTH
            ]
            # Recognized by its message, because newer versions of typer have their own copy of click.
            if before and "unexpected extra argument" in str(getattr(error, "message", "")):
                off = self._switches()[before[0]]
                error.message = f"{before[0]} takes no value; {off} is its opposite."  # type: ignore[attr-defined]
            raise

    def _spellings(self) -> set[str]:
        return {text for parameter in self.params for text in (*parameter.opts, *parameter.secondary_opts)}

    def _switches(self) -> dict[str, str]:
        """Returns the opposite spelling of each switch, e.g. {"--json": "--no-json"}."""
        pairs = ((parameter.opts, parameter.secondary_opts) for parameter in self.params)
        return {text: off[0] for on, off in pairs if off for text in on}

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help, without the opposite spellings of switches, which would take up a column of each table."""
        shown = copy(self)
        shown.params = [copy(parameter) for parameter in self.params]
        parameter: Any
        for parameter in shown.params:
            parameter.secondary_opts = []
            parameter.help = full_help(parameter)
        TyperCommand.format_help(shown, ctx, formatter)
