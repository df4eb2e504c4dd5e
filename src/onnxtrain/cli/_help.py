"""Formats the help of commands, and makes their messages refer to options instead of Python arguments.

typer's own help is five times as long, and differs between its versions.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import typer
from rich.text import Text
from typer.core import TyperCommand

from onnxtrain._console import PlainConsole, styled
from onnxtrain._dialects import suggested_option
from onnxtrain._names import settings_by_name
from onnxtrain._printable import printable
from onnxtrain._words import speaking
from onnxtrain.cli._brief_help import COMMANDS, GENERAL, OPTIONS, START
from onnxtrain.cli._shell_words import ShellWords

# Width of the first column of brief and of full help, and the widest lines, in characters.
_BRIEF, _LEFT, _WIDEST = 28, 26, 110

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
    """A command whose help fits on a screen, and which explains unknown options."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command, and makes messages refer to its options instead of Python arguments."""
        with speaking(ShellWords(str(self.name), self._spellings())):
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parses the options.

        If a value follows a switch (`--json true`), the error message explains that the switch takes no value. For an
        option of another program, such as `--num_epochs`, it names the option of this one.
        """
        given = list(args)
        # Not a parameter of its own, which commands would pass on, runs would store and docs would list.
        if "--help-all" in given and not ctx.resilient_parsing:
            self._show_all_help(ctx)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            self._explain_unknown(error, given)
            before = [
                switch for switch, word in pairwise(given) if switch in self._switches() and word in _TRUTH
            ]
            # Recognized by its message, because newer versions of typer have their own copy of click.
            if before and "unexpected extra argument" in str(getattr(error, "message", "")):
                off = self._switches()[before[0]]
                error.message = f"{before[0]} takes no value; {off} is its opposite."  # type: ignore[attr-defined]
            raise

    def _explain_unknown(self, error: Exception, given: Sequence[str]) -> None:
        """Adds to the error for an unknown option which option to pass instead."""
        unknown = getattr(error, "option_name", None)
        if not isinstance(unknown, str) or "no such option" not in str(getattr(error, "message", "")).lower():
            return
        # Of -epochs, click reads the option -e.
        words = [word for word in given if word.startswith("-") and not word.startswith("--")]
        if not unknown.startswith("--"):
            unknown = next((word for word in words if word.startswith(unknown)), unknown)
        name, _, value = unknown.partition("=")
        after = next((word for before, word in pairwise(given) if before == name), None)
        # click has already split --num_epochs=3.
        value = value or next((word.partition("=")[2] for word in given if word.startswith(f"{name}=")), "")
        value = value or (after if after is not None and not after.startswith("-") else "")
        with speaking(ShellWords(str(self.name), self._spellings())):
            better = suggested_option(name, sorted(self._spellings()), value or None)
        error.message = f"No such option: {name}."  # type: ignore[attr-defined]
        if better is not None:
            # click would add its own suggestions, which are similar words.
            error.possibilities = None  # type: ignore[attr-defined]
            error.message += f" Pass {better}."  # type: ignore[attr-defined]

    def _spellings(self) -> set[str]:
        return {text for parameter in self.params for text in (*parameter.opts, *parameter.secondary_opts)}

    def _switches(self) -> dict[str, str]:
        """Returns the opposite spelling of each switch, e.g. {"--json": "--no-json"}."""
        pairs = ((parameter.opts, parameter.secondary_opts) for parameter in self.params)
        return {text: off[0] for on, off in pairs if off for text in on}

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help: for a command with many options the most used ones, otherwise all."""
        formatter.write(_rendered(lambda console: _command_help(self, ctx, console, everything=False)))

    def _show_all_help(self, ctx: Any) -> None:
        typer.echo(_rendered(lambda console: _command_help(self, ctx, console, everything=True)), nl=False)
        ctx.exit()


def write_commands(context: Any, formatter: Any) -> None:
    """Writes the help of `onnxtrain`: its commands, its options, and what to type first."""

    def show(console: PlainConsole) -> None:
        _print(console, f"Usage: {context.command_path} COMMAND [OPTIONS]", style="bold")
        _print(console, str(context.command.help))
        commands = {name: one for name, one in context.command.commands.items() if not one.hidden}
        rest = {name: str(one.help).split(". ")[0].rstrip(".") for name, one in commands.items()}
        briefs = {name: text for name, text in COMMANDS.items() if name in commands}
        console.print()
        _columns(console, (briefs | {k: v for k, v in rest.items() if k not in briefs}).items(), 9)
        parameters = {one.name: one for one in context.command.get_params(context)}
        texts = {name: text for name, text in GENERAL.items() if name in parameters}
        console.print()
        _columns(console, [(_spelling(parameters[name]), text) for name, text in texts.items()], 22)
        _print(console, START)

    formatter.write(_rendered(show))


def _command_help(command: Any, context: Any, console: PlainConsole, *, everything: bool) -> None:
    """Prints the help of a command.

    Args:
        command: the command.
        context: its context.
        console: where to print.
        everything: True to print all options, False to print those of `_brief_help.OPTIONS`, if it has the command.
    """
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.get_params(context) if p.param_type_name == "option"]
    usage = " ".join(str(argument.metavar) for argument in arguments)
    required = " ".join(f"{p.opts[0]} {p.metavar}" for p in options if p.required)
    parts = (context.command_path, usage, required, "[OPTIONS]")
    _print(console, f"Usage: {' '.join(filter(None, parts))}", style="bold")
    console.print()
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        _print(console, paragraph)
    console.print()
    brief = OPTIONS.get(command.name)
    if brief is not None and not everything:
        by_name = {parameter.name: parameter for parameter in options}
        for heading, texts in brief.items():
            _print(console, f"{heading}:", style="bold")
            _columns(console, [(_spelling(by_name[name]), text) for name, text in texts.items()], _BRIEF)
        # Without the help option, which is not counted either.
        _columns(console, [("--help-all", f"Show all {len(options) - 1} options")], _BRIEF)
        return
    _columns(console, [(str(p.metavar), full_help(p)) for p in arguments], _LEFT)
    headings = list(dict.fromkeys(p.rich_help_panel for p in options))
    for panel in sorted(headings, key=lambda panel: panel is not None):
        chosen = [parameter for parameter in options if parameter.rich_help_panel == panel]
        _print(console, f"{panel or 'Options'}:", style="bold")
        _columns(console, [(_spelling(one), _described(one)) for one in chosen], _LEFT)


def _print(console: PlainConsole, text: str, style: str = "") -> None:
    """Prints a paragraph."""
    for line in textwrap.wrap(" ".join(text.split()), console.width):
        console.print(styled(line, style), soft_wrap=True)


def _columns(console: PlainConsole, rows: Iterable[tuple[str, str]], width: int) -> None:
    """Prints rows of two columns; a text of the first column that is wider than `width` has a line of its own."""
    indent = width + 4
    for left, right in rows:
        lines = textwrap.wrap(right, console.width - indent, break_on_hyphens=False) or [""]
        if len(left) > width:
            console.print(styled(f"  {left}", "cyan"), soft_wrap=True)
        else:
            first = Text.assemble((f"  {printable(left):<{width}}  ", "cyan"), printable(lines.pop(0)))
            console.print(first, soft_wrap=True)
        for line in lines:
            console.print(" " * indent + line, soft_wrap=True)


def _spelling(parameter: Any) -> str:
    """Returns how to write an option, e.g. "-o, --output DIR"; without the opposite of a switch."""
    names = ", ".join(sorted(parameter.opts, key=lambda name: name.startswith("--")))
    if parameter.is_flag or parameter.count:
        return names
    return f"{names} {parameter.metavar or 'TEXT'}"


def _described(parameter: Any) -> str:
    """Returns the help text of an option, with its default unless the text says it."""
    text = full_help(parameter)
    if parameter.required:
        return f"{text} [required]"
    shown = parameter.default not in (None, False, "", ()) and not callable(parameter.default)
    return f"{text} [default: {parameter.default}]" if shown and "Default" not in text else text


def _rendered(show: Callable[[PlainConsole], None]) -> str:
    console = PlainConsole()
    # Longer lines are hard to read.
    console.width = min(console.width, _WIDEST)
    with console.capture() as capture:
        show(console)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"
