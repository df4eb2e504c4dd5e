"""Prints the results of commands as tables or JSON, and errors as a single message."""

from __future__ import annotations

import json
import logging
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from onnxtrain._console import PlainConsole, styled
from onnxtrain._printable import escape_record, get_logger, printable
from onnxtrain._words import speaking
from onnxtrain.cli._shell_words import ShellWords
from onnxtrain.errors import OnnxTrainError

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells report it."""

_PIPE_WIDTH = 160


Content = Table | Text | str
"""Printable content. Strings contain no markup."""


def _show(*content: Content, stderr: bool = False) -> None:
    """Prints tables and lines. If the output is a pipe, tables are up to 160 columns wide, without trailing spaces."""
    console = PlainConsole(stderr=stderr)
    if console.is_terminal:
        for part in content:
            console.print(part)
        return
    # A pipe has no width: rich would assume 80 columns and break the rows of wide tables.
    console = PlainConsole(stderr=stderr, width=_PIPE_WIDTH)
    with console.capture() as capture:
        for part in content:
            console.print(part)
    lines = (line.rstrip() for line in capture.get().splitlines())
    print("\n".join(lines), file=sys.stderr if stderr else sys.stdout)


def table(
    title: str | None, columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[int] = ()
) -> Table:
    """Creates a table.

    Args:
        title: title of the table; None for no title.
        columns: titles of the columns.
        rows: one sequence of cells per row.
        right: indices of the right-aligned columns.
    """
    # A box without vertical lines, so that cells can be copied from a terminal.
    result = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        # Without overflow="fold", rich would truncate long parameter names, which people copy.
        result.add_column(column, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        result.add_row(*map(str, row))
    return result


def heading(text: str) -> Text:
    """Returns a title to print above a table, because rich would wrap a table's own title to the table's width."""
    return styled(text, "bold")


def summary_table(title: str | None, rows: Iterable[tuple[str, object]]) -> Table:
    """Creates a table with a name and a value per row, without a header."""
    result = Table(title=title, box=box.ROUNDED, show_header=False, title_justify="left", title_style="bold")
    result.add_column(style="dim")
    result.add_column(justify="right")
    for name, value in rows:
        result.add_row(name, str(value))
    return result


def print_table(*content: Content) -> None:
    """Prints tables and lines to standard output."""
    _show(*content)


def print_command(text: str) -> None:
    """Prints one line to standard output without wrapping it, e.g. a command to copy."""
    print(printable(text))


def print_json(document: Any) -> None:
    """Prints a JSON document to standard output; NaN and infinity become null."""
    # json escapes non-ASCII characters and all control characters but DEL.
    print(json.dumps(_jsonable(document), indent=2, allow_nan=False).replace("\x7f", "\\u007f"))


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, float):
        # JSON has neither NaN nor infinity. Python would write them, and strict parsers would reject the document.
        return value if value == value and abs(value) != float("inf") else None
    return value if isinstance(value, str | int | bool | None) else str(value)


def info(text: str) -> None:
    """Prints a note to standard error, so that standard output contains only results."""
    PlainConsole(stderr=True).print(text, soft_wrap=True)


def print_next(*words: object) -> None:
    """Prints the command to type after this one to standard error, e.g. "Next: onnxtrain export run -o model.onnx"."""
    info(f"Next: {shlex.join(['onnxtrain', *map(str, words)])}")


def info_table(content: Table) -> None:
    """Prints a table to standard error."""
    _show(content, stderr=True)


@contextmanager
def logging_to_terminal(level: int) -> Iterator[None]:
    """Context manager that prints the package's log and Python warnings to standard error.

    Control characters are escaped in this output, and in log messages of other packages, which Python's last-resort
    handler prints.

    Args:
        level: minimum level of the log messages to print, e.g. `logging.WARNING`.
    """
    logger, foreign = get_logger(), logging.lastResort
    handler = RichHandler(level, PlainConsole(stderr=True), show_time=False, show_path=False)
    before = logger.level
    logger.setLevel(level)
    logger.addHandler(handler)
    # Other packages, such as onnx_ir and pandas, also log names from a file, which have to be escaped.
    if foreign is not None:
        foreign.addFilter(escape_record)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, kind, *_, **__: info(f"{kind.__name__}: {message}")
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before)


def guarded(run: Callable[[], None], *, debug: bool) -> None:
    """Runs a command; if it raises an exception, prints the error and exits with code 1.

    An OnnxTrainError is printed without a traceback, unless `debug` is True; other exceptions are always printed with
    one. If the reader of standard output has exited (`| head`), nothing is printed.

    Args:
        run: function that runs the command.
        debug: True to print the traceback of an OnnxTrainError.
    """
    try:
        with speaking(ShellWords()):
            run()
    except BrokenPipeError:
        # The reader of the pipe (head, less) has exited. Closing standard error keeps Python from reporting it at exit.
        sys.stderr.close()
        sys.exit(1)
    except Exception as error:
        if isinstance(error, OnnxTrainError) and not debug:
            # soft_wrap keeps paths and commands in a message on one line, so that they can be copied.
            PlainConsole(stderr=True).print(styled("error:", "bold red"), str(error), soft_wrap=True)
        else:
            # Printed here to escape control characters: errors of other packages may quote names from a file.
            lines = "".join(traceback.format_exception(error)).splitlines()
            print("\n".join(map(printable, lines)), file=sys.stderr)
        sys.exit(1)
