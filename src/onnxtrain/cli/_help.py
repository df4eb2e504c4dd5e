"""Writes `--help` of a command, and speaks in messages of the options that it has."""

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
    """Returns the help text of an option or argument, with the settings of each loss or optimizer if it sets one.

    The classes of losses and optimizers know their settings. They are imported here, not by every command.
    """
    text = str(parameter.help or "")
    try:
        if parameter.name == "loss_option":
            from onnxtrain.losses import LOSSES

            return f"{text} Settings: {_settings(LOSSES, {'reduction'})}; reduction of all."
        if parameter.name == "optimizer_option":
            from onnxtrain.optimizers import OPTIMIZERS

            # Weight decay and clipping have options of their own, groups are for Python.
            others = {"weight_decay", "clip_grad", "groups"}
            return f"{text} Settings: {_settings(OPTIMIZERS, others)}."
    except ModuleNotFoundError:
        # Without onnx the help is shown all the same.
        return text
    return text


def _settings(kinds: Mapping[str, type[Any]], others: Collection[str]) -> str:
    """Lists the settings of classes by name, without `others`, e.g. "focal: alpha, gamma; huber: delta"."""
    named = {
        name: [field.name for field in fields(kind) if field.name not in others]
        for name, kind in kinds.items()
    }
    return settings_by_name({name: ", ".join(settings) for name, settings in named.items() if settings})


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
        parameter: Any
        for parameter in shown.params:
            parameter.secondary_opts = []
            parameter.help = full_help(parameter)
        TyperCommand.format_help(shown, ctx, formatter)
