"""Print tables of results, and write them into a page of the documentation, each between the comments of its name.

Programs of the other folders put this folder on their path.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

__all__ = ["lines", "place", "write", "write_tables"]


def lines(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Writes a table in Markdown."""
    head = list(head)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def place(name: str) -> re.Pattern[str]:
    """Returns the pattern of a table in a page; its group is the table."""
    return re.compile(rf"(?<=<!-- table {name} -->\n)(?:\n(.*?)\n\n)?(?=<!-- end -->)", re.DOTALL)


def write_tables(page: Path, tables: Mapping[str, str], plot: Callable[[Path], None]) -> None:
    """Is the program: prints the tables; writes them into the page for `--write`, and draws for `--plot FILE`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help=f"put the tables into {page.name}")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them")
    options = parser.parse_args()
    write(page, tables, into_page=options.write)
    if options.plot:
        plot(options.plot)


def write(page: Path, tables: Mapping[str, str], *, into_page: bool) -> None:
    """Prints the tables, and writes them into the page if `into_page` is True."""
    text = page.read_text(encoding="utf-8") if into_page else ""
    for name, table in tables.items():
        print(f"\n{name}\n\n{table}")
        if into_page and not place(name).search(text):
            raise SystemExit(f"{page.name} has no place for the table '{name}'")
        text = place(name).sub(lambda found, table=table: f"\n{table}\n\n", text)
    if into_page:
        page.write_text(text, encoding="utf-8")
