"""What the commands print: tables for people, JSON for pipes, errors as one message."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console, ConsoleRenderable
from rich.logging import RichHandler
from rich.markup import escape
from rich.table import Table

from onnxtrain.errors import OnnxTrainError

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells report it."""

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of tables. Default: tables.")
]

_PIPE_WIDTH = 160


def _console(*, stderr: bool = False) -> Console:
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and not stderr:
        console = Console(highlight=False, width=_PIPE_WIDTH)  # a pipe has no width that could be asked for
    return console


def table(
    title: str | None, columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[int] = ()
) -> Table:
    """Returns a table; `right` are the indices of columns to align right."""
    result = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        result.add_column(column, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        result.add_row(*(escape(str(cell)) for cell in row))
    return result


def heading(text: str) -> str:
    """Returns a line to print before a table without a title: a title would be broken at the table's width."""
    return f"[bold]{escape(text)}[/]"


def summary_table(title: str | None, rows: Iterable[tuple[str, object]]) -> Table:
    """Returns a table of names and values without a header."""
    result = Table(title=title, box=box.ROUNDED, show_header=False, title_justify="left", title_style="bold")
    result.add_column(style="dim")
    result.add_column(justify="right")
    for name, value in rows:
        result.add_row(escape(name), escape(str(value)))
    return result


def print_table(*tables: Table | str) -> None:
    """Prints tables and lines to standard output, in a pipe without trailing blanks."""
    console = _console()
    if console.is_terminal:
        console.print(*tables, sep="\n")
        return
    with console.capture() as capture:
        console.print(*tables, sep="\n")
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def print_json(document: Any) -> None:
    """Prints a JSON document to standard output; NaN becomes null."""
    print(json.dumps(_jsonable(document), indent=2, allow_nan=False))


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    return value if isinstance(value, str | int | bool | None) else str(value)


def info(text: str) -> None:
    """Prints a remark to standard error, so that it does not get into a pipe."""
    _console(stderr=True).print(text, soft_wrap=True, markup=False)


def info_table(content: Table) -> None:
    """Prints a table to standard error, without trailing blanks."""
    console = _console(stderr=True)
    if console.is_terminal:
        console.print(content)
        return
    console = Console(stderr=True, highlight=False, width=_PIPE_WIDTH)
    with console.capture() as capture:
        console.print(content)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()), file=sys.stderr)


_WORDS = [
    (re.compile(pattern), words)
    for pattern, words in (
        (r"Go on with Trainer\.resume\('(.*?)'\)", r"Go on with: onnxtrain train \1 --data FILE"),
        (r"make it so: \w+\(onnxtrain\.make_batch_dynamic\(model\), \.\.\.\)", "pass --dynamic-batch"),
        (r"onnxtrain\.make_batch_dynamic\(model\)", "--dynamic-batch"),
        (r", or leave incomplete batches out \(drop_last=True\)", ""),
        (r"\bbatch_norm='?(\w+)'?", r"--batch-norm \1"),
        (r"\bclip_grad_norm=([\d.]+)", r"--clip-norm \1"),
        (r"\boverwrite=True\b", "--overwrite"),
        (r"\bschedule_epochs\b", "--schedule-epochs"),
        (r"\bwarmup_steps\b", "--warmup"),
        (r"\bwarmup_ratio\b", "--warmup-ratio"),
        (r"\bema_decay\b", "--ema-decay"),
        (r"\baccumulate=(\d+)", r"--accumulate \1"),
        (r"\boptimizer='(\w+)'", r"--optimizer \1"),
        (r"\bbatch_size\b", "--batch-size"),
        (r"\baccumulate\b(?! \d)", "--accumulate"),
        (r"\brequires_grad\b(?!=)", "--train"),
        (r"\bfrozen_params\b", "--freeze"),
        (r"\blearning_rate\b", "--learning-rate"),
        (r"\bbatch_norm\b", "--batch-norm"),
    )
]


def shell_words(text: str) -> str:
    """Returns a message of the Python API in the words of the command line.

    >>> shell_words("Pass batch_norm='training', or leave batch_size out.")
    'Pass --batch-norm training, or leave --batch-size out.'
    """
    for pattern, words in _WORDS:
        text = pattern.sub(words, text)
    return text


class ShellHandler(RichHandler):
    """Prints what the package logs, in the words of the command line; the records stay as they are."""

    def render_message(self, record: logging.LogRecord, message: str) -> ConsoleRenderable:
        """Returns the message of a record for the console."""
        return super().render_message(record, shell_words(message))


def given_options(context: typer.Context) -> frozenset[str]:
    """Returns the names of the parameters that were given on the command line, in place of their defaults."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(name for name, source in sources.items() if source and source.name == "COMMANDLINE")


def guarded(run: Callable[[], None], *, debug: bool) -> None:
    """Runs a command; a deliberate error becomes one message and exit code 1."""
    try:
        run()
    except OnnxTrainError as error:
        if debug:
            raise
        console = _console(stderr=True)
        console.print(f"[bold red]error:[/] {escape(shell_words(str(error)))}", soft_wrap=True)
        sys.exit(1)
    except BrokenPipeError:  # the reader of the pipe (head, less) has gone
        sys.stderr.close()
        sys.exit(1)
