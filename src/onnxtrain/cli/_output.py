"""Prints the results of commands: tables for people, JSON for pipes, errors as one message."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from onnxtrain._words import speaking
from onnxtrain.cli._shell_words import ShellWords
from onnxtrain.errors import OnnxTrainError

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells report it."""

_PIPE_WIDTH = 160


def _show(*content: Table | str, stderr: bool = False) -> None:
    """Prints tables and lines; in a pipe without trailing blanks."""
    console = Console(stderr=stderr, highlight=False)
    if console.is_terminal:
        console.print(*content, sep="\n")
        return
    # A pipe has no width; rich would wrap at 80 columns and break the rows of wide tables.
    console = Console(stderr=stderr, highlight=False, width=_PIPE_WIDTH)
    with console.capture() as capture:
        console.print(*content, sep="\n")
    lines = (line.rstrip() for line in capture.get().splitlines())
    print("\n".join(lines), file=sys.stderr if stderr else sys.stdout)


def table(
    title: str | None, columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[int] = ()
) -> Table:
    """Makes a table; `right` are the indices of columns to align right."""
    # A box without vertical lines: cells can be copied from a terminal.
    result = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        # overflow="fold": rich would cut long names of parameters, which people copy.
        result.add_column(column, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        # Names such as "layers[0]" contain brackets, which rich takes for markup.
        result.add_row(*(escape(str(cell)) for cell in row))
    return result


def heading(text: str) -> str:
    """Formats a title to print before a table: rich would wrap a title at the table's width."""
    return f"[bold]{escape(text)}[/]"


def summary_table(title: str | None, rows: Iterable[tuple[str, object]]) -> Table:
    """Makes a table of names and values without a header."""
    result = Table(title=title, box=box.ROUNDED, show_header=False, title_justify="left", title_style="bold")
    result.add_column(style="dim")
    result.add_column(justify="right")
    for name, value in rows:
        result.add_row(escape(name), escape(str(value)))
    return result


def print_table(*tables: Table | str) -> None:
    """Prints tables and lines to standard output."""
    _show(*tables)


def print_json(document: Any) -> None:
    """Prints a JSON document to standard output; NaN becomes null."""
    print(json.dumps(_jsonable(document), indent=2, allow_nan=False))


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, float):
        # JSON has no NaN and no infinity; Python would write them, and strict parsers refuse the document.
        return value if value == value and abs(value) != float("inf") else None
    return value if isinstance(value, str | int | bool | None) else str(value)


def info(text: str) -> None:
    """Prints a remark to standard error, so that pipes get results alone."""
    Console(stderr=True, highlight=False).print(text, soft_wrap=True, markup=False)


def info_table(content: Table) -> None:
    """Prints a table to standard error."""
    _show(content, stderr=True)


def guarded(run: Callable[[], None], *, debug: bool) -> None:
    """Runs a command; a deliberate error becomes one message and exit code 1."""
    try:
        with speaking(ShellWords()):
            run()
    except OnnxTrainError as error:
        if debug:
            raise
        console = Console(stderr=True, highlight=False)
        # soft_wrap: a path or a command in a message is not broken, so that it can be copied.
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)
    except BrokenPipeError:
        # The reader of the pipe (head, less) has ended. Closing standard error keeps Python from reporting it at exit.
        sys.stderr.close()
        sys.exit(1)
