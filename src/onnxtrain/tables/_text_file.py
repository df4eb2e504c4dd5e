"""Reads tables from text files (.csv, .tsv), also compressed by gzip, in the dialect that is recognized or given."""

from __future__ import annotations

import csv
import gzip
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from onnxtrain._words import argument
from onnxtrain.tables._dialect import (
    Dialect,
    Given,
    checked_separator,
    marked_encoding,
    recognize_decimal,
    recognize_separator,
)

_SAMPLE = 2**20
"""Number of characters in which the separator is looked for."""


def read_text_file(
    pandas: Any, path: Path, given: Given, like: Dialect | None, *, tabs: bool
) -> tuple[Any, Dialect]:
    """Reads a text file into a `DataFrame` of strings.

    Args:
        pandas: the package.
        path: path of the file.
        given: parts of the dialect that the user specified; they are not recognized.
        like: dialect of an earlier file, for what this file leaves open.
        tabs: True if the name of the file declares tabs (.tsv).

    Returns:
        The frame and the dialect.

    Raises:
        ValueError: the file can be read in several ways, or is not a table.
    """
    with _opened(path) as file:
        start = file.read(4)
    if start == b"PK\3\4":
        raise ValueError("it is a zip archive, such as an Excel workbook. Save the table as .csv or .parquet")
    encoding = given.encoding or marked_encoding(start) or "utf-8"
    try:
        return _read(pandas, path, encoding, given, like, tabs=tabs)
    except UnicodeDecodeError as error:
        if given.encoding is None and like is not None and like.encoding != encoding:
            return _read(pandas, path, like.encoding, given, like, tabs=tabs)
        raise ValueError(_encoding_advice(error, encoding)) from error


def _read(
    pandas: Any, path: Path, encoding: str, given: Given, like: Dialect | None, *, tabs: bool
) -> tuple[Any, Dialect]:
    # Skips a byte order mark, with which Excel begins files.
    decode = "utf-8-sig" if encoding == "utf-8" else encoding
    with _opened(path) as binary, io.TextIOWrapper(binary, decode, newline="") as text:
        sample = text.read(_SAMPLE + 1)
    if "\0" in sample:
        raise ValueError(
            f"it contains null characters. If it is a text in UTF-16, pass {argument('encoding', 'utf-16-le')}"
        )
    # Excel's way to declare the separator: a first line `sep=;`.
    declared = re.match(r"sep=([^\r\n\w])\r?\n", sample, re.IGNORECASE)
    skipped = 1 if declared else 0
    sample_of_table = sample[declared.end() :] if declared else sample
    separator = given.separator or (checked_separator(declared[1]) if declared else None)
    if separator is None:
        separator = recognize_separator(
            sample_of_table,
            whole=len(sample) <= _SAMPLE,
            prefer="\t" if tabs else None,
            like=None if like is None else like.separator,
        )
    header = next(csv.reader(io.StringIO(sample_of_table, newline=""), delimiter=separator), [])
    with _opened(path) as binary, io.TextIOWrapper(binary, decode, newline="") as text:
        frame = pandas.read_csv(
            text,
            sep=separator,
            skiprows=skipped,
            dtype=str,
            # By default pandas reads "NA" (Namibia) and "None" as missing.
            keep_default_na=False,
            na_filter=False,
            # In a table of one column an empty line is a row with a missing value.
            skip_blank_lines=len(header) > 1,
        )
    # If rows have more fields than the header, pandas silently uses the first fields as an index.
    if frame.shape[1] != len(header) or not isinstance(frame.index, pandas.RangeIndex):
        raise ValueError(
            f"rows have more fields than the header, which has {len(header)} at "
            f"{argument('separator', separator)}. Quote fields that contain the separator, or pass another one"
        )
    # pandas renames the second of two equal names ("a", "a.1"), which would hide the duplicate.
    frame.columns = header
    decimal = given.decimal
    if decimal is None:
        columns = {name: frame.iloc[:, index] for index, name in enumerate(header)}
        decimal = recognize_decimal(columns, separator, None if like is None else like.decimal)
    return frame, Dialect(separator=separator, decimal=decimal, encoding=encoding)


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file for reading, and decompresses it if it begins as gzip does, whatever its name."""
    with path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if not compressed:
            yield file
            return
        with gzip.open(file, "rb") as content:
            yield cast(IO[bytes], content)


def _encoding_advice(error: UnicodeDecodeError, encoding: str) -> str:
    """Describes text that is not in the expected encoding, and shows how it would read in a likely one."""
    likely = "cp1252"
    # The word around the first wrong byte, which shows whether the guess is right.
    before = re.split(rb"[^\w\x80-\xff .'-]", error.object[max(0, error.start - 20) : error.start])[-1]
    after = re.split(rb"[^\w\x80-\xff .'-]", error.object[error.start : error.start + 20])[0]
    shown = (before + after).decode(likely, "replace")
    return (
        f"it is not in the encoding {encoding}. Pass {argument('encoding', likely)} if it contains {shown!r} "
        f"(Windows, Western Europe), or another encoding, e.g. {argument('encoding', 'cp1250')} (Central Europe) or "
        f"{argument('encoding', 'cp1251')} (Cyrillic)"
    )
