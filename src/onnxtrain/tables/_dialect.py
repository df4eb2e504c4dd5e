"""Recognizes how a text file spells a table: the separator of fields, the decimal mark, and the encoding.

Recognition is certain or asks: a file that can be read in two ways raises an error that names the arguments to pass.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from onnxtrain._words import argument
from onnxtrain.errors import InputError

Decimal: TypeAlias = Literal[".", ","]
"""Character between the whole and the fractional digits of a number."""

SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
"""Separators that are recognized, by the name that users may pass in their place."""

_NAMES = {character: name for name, character in SEPARATORS.items()} | {" ": "space"}
_ROWS = 500
"""Number of rows in which each separator is tried."""

# The marks of a file, longest first: that of UTF-16 is the beginning of that of UTF-32.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """Spelling of a table in a text file: separator, decimal mark and encoding.

    Attributes:
        separator: character between fields, e.g. ";".
        decimal: decimal mark of numbers, "." or ",". The other one may separate thousands.
        encoding: Python's name of the encoding, e.g. "cp1252".

    Raises:
        InputError: a value is not a separator, decimal mark or encoding.

    >>> Dialect(separator="semicolon", decimal=",").description
    'fields separated by ";", decimal comma'
    """

    separator: str = ","
    decimal: Decimal = "."
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        # Only the constructor of a frozen dataclass may set fields.
        object.__setattr__(self, "separator", checked_separator(self.separator))
        object.__setattr__(self, "encoding", checked_encoding(self.encoding))
        check_decimal(self.decimal)

    @property
    def description(self) -> str:
        """Differences from commas, decimal points and UTF-8, e.g. 'fields separated by ";"'; "" if there are none."""
        separator = "tabs" if self.separator == "\t" else f'"{self.separator}"'
        parts = {
            f"fields separated by {separator}": self.separator != ",",
            "decimal comma": self.decimal == ",",
            f"encoding {self.encoding}": self.encoding != "utf-8",
        }
        return ", ".join(text for text, shown in parts.items() if shown)


class Given(NamedTuple):
    """The parts of a dialect that the user specified; None for a part to recognize."""

    separator: str | None = None
    decimal: Decimal | None = None
    encoding: str | None = None

    def checked(self) -> Given:
        """Returns a copy with the separator as a character. Raises InputError if a part is invalid."""
        if self.decimal is not None:
            check_decimal(self.decimal)
        return Given(
            None if self.separator is None else checked_separator(self.separator),
            self.decimal,
            None if self.encoding is None else checked_encoding(self.encoding),
        )


def checked_separator(text: object) -> str:
    r"""Returns a separator as a character.

    Args:
        text: a character, or "comma", "semicolon", "tab", "pipe" or "space".

    Raises:
        InputError: it is neither, or is a letter, digit, quote or sign, which fields contain.

    >>> checked_separator("tab"), checked_separator(r"\t"), checked_separator(";")
    ('\t', '\t', ';')
    """
    character = {**SEPARATORS, "space": " ", r"\t": "\t"}.get(str(text), text)
    if (
        not isinstance(character, str)
        or len(character) != 1
        or character.isalnum()
        or character in "\"'\r\n\0.+-"
    ):
        raise InputError(
            f"{argument('separator')} must be a character such as ';', or one of {', '.join(SEPARATORS)} and space, "
            f"received {text!r}."
        )
    return character


def check_decimal(text: object) -> None:
    """Raises InputError if `text` is not a decimal mark."""
    if text not in (".", ","):
        raise InputError(f"{argument('decimal')} must be '.' or ',', received {text!r}.")


def checked_encoding(name: object) -> str:
    """Returns Python's name of an encoding, e.g. "cp1252" for "windows-1252".

    Raises:
        InputError: Python has no text encoding of this name.
    """
    try:
        # Refuses codecs that do not decode text, such as "hex".
        found = io.TextIOWrapper(io.BytesIO(), encoding=codecs.lookup(str(name)).name).encoding
    except (LookupError, ValueError):
        raise InputError(
            f"{argument('encoding')} must be an encoding such as utf-8, utf-16, cp1252 or latin-1, received {name!r}."
        ) from None
    return "utf-8" if found == "utf-8-sig" else found


def marked_encoding(start: bytes) -> str | None:
    """Returns the encoding that the byte order mark at the start of a file declares; None if there is no mark."""
    return next((encoding for mark, encoding in _MARKS if start.startswith(mark)), None)


def recognize_separator(sample: str, *, whole: bool, prefer: str | None, like: str | None) -> str:
    """Finds the character that separates the fields of a table.

    A character separates the fields if the header and every row have the same number of fields when split at it.

    Args:
        sample: beginning of the file, with the header.
        whole: True if the sample is the whole file; otherwise, its last row may be incomplete.
        prefer: separator that the name of the file declares, e.g. a tab for .tsv; it is chosen if several would fit.
        like: separator of an earlier file, chosen if several would fit.

    Raises:
        ValueError: several separators fit; the message names the arguments to pass.
    """
    # The number of fields of the header and of each row, by separator.
    counts: dict[str, list[int]] = {}
    for separator in SEPARATORS.values():
        reader = csv.reader(io.StringIO(sample, newline=""), delimiter=separator)
        try:
            rows = [len(row) for row in islice(reader, _ROWS + 1) if row]
        except csv.Error:
            continue
        if not whole and len(rows) <= _ROWS:
            rows = rows[:-1]
        if rows and rows[0] > 1:
            counts[separator] = rows
    fitting = [s for s, rows in counts.items() if set(rows) == {rows[0]}]
    # Programs leave out empty fields at the end of a row.
    fitting = fitting or [s for s, rows in counts.items() if max(rows) == rows[0] and rows[0] in rows[1:]]
    if not fitting:
        # In the name of a single column, it separates nothing; otherwise, the error will be about the rows.
        fitting = [s for s, rows in counts.items() if s == "," or max(rows[1:], default=2) > 1]
    if len(fitting) < 2:
        return fitting[0] if fitting else ","
    for known in (prefer, like):
        if known in fitting:
            return known
    ways = " or ".join(f"{_NAMES[s]} ({counts[s][0]} columns)" for s in fitting)
    raise ValueError(
        f"its fields may be separated by {ways}. Pass {argument('separator', _NAMES[fitting[0]])} or "
        f"{argument('separator', _NAMES[fitting[1]])}"
    )


# Separators of thousands besides "." and ",": no-break spaces, apostrophes. A plain space is one only in a number with
# a decimal mark, because codes contain spaces, too.
_GROUPS = "[\u00a0\u202f'\u2019]"


def _pattern(decimal: str) -> str:
    mark, other = ("[.]", ",") if decimal == "." else (",", "[.]")
    groups = "|".join(f"(?:{group}[0-9]{{3}})+" for group in (other, _GROUPS, " "))
    grouped = f"[1-9][0-9]{{0,2}}(?:{groups})"
    return f"\\s*[+-]?(?:(?:{grouped}|[0-9]+)(?:{mark}[0-9]*)?|{mark}[0-9]+)(?:[eE][+-]?[0-9]+)?\\s*"


_NUMBER = {decimal: _pattern(decimal) for decimal in (".", ",")}
_COMPILED = {decimal: re.compile(pattern) for decimal, pattern in _NUMBER.items()}


def recognize_decimal(columns: dict[str, Any], separator: str, like: Decimal | None) -> Decimal:
    """Finds the decimal mark of a table whose fields are strings.

    A column shows it if its fields are numbers with one of the marks only: "1,5" with the comma, "0.5" with the point,
    "1,234" with both.

    Args:
        columns: pandas `Series` of strings, by column name.
        separator: separator of the fields.
        like: decimal mark of an earlier file, used if the table can be read with both.

    Raises:
        ValueError: the table can be read with both; the message names the arguments to pass.
    """
    # One field as evidence, and its column, by mark.
    shown: dict[str, tuple[str, str]] = {}
    unclear: dict[str, tuple[str, str]] = {}
    with_commas = {name for name, column in columns.items() if column.str.contains(",", regex=False).any()}
    # The usual case: nothing to tell apart.
    if separator == "," and not with_commas:
        return "."
    for name, column in columns.items():
        if not with_commas and "." in shown:
            break
        texts = column[column.str.contains("[0-9]").fillna(False).astype(bool)]
        marked = texts[texts.str.contains("[.,]").astype(bool)]
        if not len(marked):
            continue
        fits = [mark for mark, pattern in _NUMBER.items() if texts.str.fullmatch(pattern).all()]
        if len(fits) == 1:
            # A field that cannot be read with the other mark.
            other = marked[~marked.str.fullmatch(_NUMBER["," if fits == ["."] else "."]).astype(bool)]
            shown.setdefault(fits[0], (str(other.iloc[0]), name))
        elif fits and not (separator == "," and name not in with_commas):
            # Where commas separate fields, a point without further evidence is a decimal point.
            unclear.setdefault(name, (str(marked.iloc[0]), name))
    if len(shown) == 1:
        return "," if "," in shown else "."
    if like is not None and (shown or unclear):
        return like
    options = f"Pass {argument('decimal', ',')} or {argument('decimal', '.')}"
    if shown:
        (comma, first), (point, second) = shown[","], shown["."]
        raise ValueError(
            f"column '{first}' has {comma!r}, as with a decimal comma, but column '{second}' has {point!r}, as with a "
            f"decimal point. {options}"
        )
    if unclear:
        text, name = next(iter(unclear.values()))
        bare, whole = re.sub("[.,]", ".", text, count=1).strip(), re.sub("[.,]", "", text).strip()
        bare = bare.rstrip("0").rstrip(".")
        raise ValueError(f"column '{name}': {text!r} may be {whole} or {bare}. {options}")
    return "."


def respelled(texts: Sequence[str], decimal: Decimal) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Rewrites the numbers of a column with a decimal point and without separators of thousands.

    Thousands are separated only if all fields of the column that contain digits are numbers.

    Args:
        texts: the fields.
        decimal: decimal mark of the table.

    Returns:
        The fields, object [n], and a mask of the fields that are no numbers with this decimal mark, although they
        would be with a decimal point, bool [n].

    >>> respelled(["1.234,5", "-2", "NA"], ",")
    (array(['1234.5', '-2', 'NA'], dtype=object), array([False, False, False]))
    """
    result = np.array(texts, object)
    refused = np.zeros(len(result), bool)
    number = _COMPILED[decimal]
    marks = re.compile("[,'\u2019\u00a0\u202f ]" if decimal == "." else "[.,'\u2019\u00a0\u202f ]")
    rows = [row for row, text in enumerate(texts) if marks.search(text)]
    if not rows:
        return result, refused
    matches = {row: number.fullmatch(texts[row]) is not None for row in rows}
    # Whether fields without such marks are numbers matters only if thousands are separated.
    groups = all(matches.values()) and all(
        number.fullmatch(text) or not re.search("[0-9]", text) for text in texts
    )
    spaces = groups and any(decimal in texts[row] for row in rows)
    other = "," if decimal == "." else "."
    for row in rows:
        text = texts[row].strip()
        grouped = bool(re.search(rf"[{re.escape(other)}'\u2019\u00a0\u202f]", text))
        if not matches[row] or (grouped and not groups) or (" " in text and not spaces):
            refused[row] = decimal == ","
            continue
        result[row] = re.sub(rf"[{re.escape(other)}'\u2019\u00a0\u202f ]", "", text).replace(decimal, ".")
    return result, refused
