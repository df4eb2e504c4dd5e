"""Handles Ctrl-C: prints one line that says what was saved, and exits with code 130."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from onnxtrain._printable import printable
from onnxtrain.cli._brief_help import SAME_COMMAND
from onnxtrain.cli._help import write_commands
from onnxtrain.cli._output import INTERRUPTED, info
from onnxtrain.errors import OnnxTrainError


class Interrupted(KeyboardInterrupt):
    """Raised on Ctrl-C. Its message is a sentence that says what was saved."""


class InterruptibleGroup(TyperGroup):
    """The group of all commands; handles Ctrl-C during a command, including the import of the command's modules."""

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        """Parses the options that precede the command, e.g. `--debug`."""
        with _printable_usage_errors():
            return super().make_context(*arguments, **settings)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help of `onnxtrain`."""
        write_commands(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parses the options that precede the command; shows the help if there is nothing at all."""
        # Not with `no_args_is_help`, for which typer (0.29) prints the help only if it has made it itself.
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command. For the name that another program has for it, such as `fit`, the error says ours."""
        ours = next((name for name, same in SAME_COMMAND.items() if args[0] in same.split()), None)
        if ours is not None and args[0] not in self.commands and not ctx.resilient_parsing:
            ctx.fail(f"No such command '{args[0]}'. Use: {ctx.command_path} {ours}")
        return super().resolve_command(ctx, args)

    def invoke(self, context: Any) -> Any:
        """Runs a command. On Ctrl-C, prints what was saved and exits with code 130."""
        try:
            with _printable_usage_errors():
                return super().invoke(context)
        except KeyboardInterrupt as interrupt:
            info(
                f"Interrupted. {interrupt}"
                if isinstance(interrupt, Interrupted)
                else "Interrupted. No file was written."
            )
            sys.exit(INTERRUPTED)


@contextmanager
def _printable_usage_errors() -> Iterator[None]:
    """Context manager that escapes control characters in click's usage errors, which may quote file names."""
    try:
        yield
    except Exception as error:
        # Recognized by its message, because newer versions of typer have their own copy of click without access to the
        # base class of its errors.
        if isinstance(message := getattr(error, "message", None), str):
            error.message = printable(message)  # type: ignore[attr-defined]
        raise


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Context manager that ignores Ctrl-C, for code that cleans up after an earlier Ctrl-C or an error."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # None stands for a handler that was not installed from Python.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)


@contextmanager
def report_saved_state_on_interrupt(directory: Path, again: str) -> Iterator[None]:
    """Context manager that raises :class:`Interrupted` on Ctrl-C, with a message about what the run has saved.

    Args:
        directory: directory of the run.
        again: options that the suggested command needs to resume the run, e.g. " --workers 2"; "" for none.
    """
    try:
        yield
    except KeyboardInterrupt:
        with uninterrupted():
            sentence = _saved(directory, again)
        # A KeyboardInterrupt, so that no `except Exception` on the way catches it.
        raise Interrupted(sentence) from None


def _saved(directory: Path, again: str) -> str:
    # Imported here, because --help and completion import this module and do not need the trainer.
    from onnxtrain.cli._saved_run import saved_position, saved_properties

    try:
        properties = saved_properties(directory)
        if properties is None:
            return "Nothing was saved: training had not started."
        position = saved_position(properties, directory)
        if position is None:
            return f"'{directory}' contains the unchanged model: training had not started."
    except (OnnxTrainError, OSError) as error:
        return f"The run in '{directory}' cannot be read: {error}"
    run, plan = shlex.quote(str(directory)), position.plan
    if position.epoch and not position.unfinished:
        return f"The run in '{directory}' is saved with all its epochs. Export it: onnxtrain export {run} -o FILE."
    end = f" of {position.fit_start + plan.epochs}" if plan is not None else ""
    batches = f" and {position.batch} batches" if position.batch else ""
    return (
        f"The run in '{directory}' is saved as it was after {position.epoch}{end} epochs{batches}: "
        f"onnxtrain train {run}{again} resumes it."
    )
