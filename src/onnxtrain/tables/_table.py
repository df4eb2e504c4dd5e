"""Reads tables from files: .csv fields are texts until a column is read as numbers; .parquet has types."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.errors import InputError
from onnxtrain.selection import some_names

TABLE_SUFFIXES = (".csv", ".parquet")

# Fields of a .csv file that are truth values, in lower case: pandas writes True, R writes TRUE.
_TRUTH = {"true": 1.0, "false": 0.0}


# Imported late: .npz files do without pandas.
def frame_library() -> Any:
    """Imports pandas. Raises InputError: pandas is not installed."""
    try:
        import pandas
    except ImportError as error:
        raise InputError("Tables need pandas: pip install 'onnxtrain[data]'.") from error
    return pandas


@dataclass(frozen=True)
class Values:
    """Values of a column.

    Attributes:
        missing: bool [rows], True for a row without a value.
        numbers: float64 [rows]; NaN where `is_number` is False.
        is_number: bool [rows], True for a number or a truth value (0 and 1); False for a missing value.
        raw: values as the file holds them, object [rows]; texts for a .csv file.
        text_type: True if the file declares a column of texts, as .parquet files can.
    """

    missing: np.ndarray[Any, Any]
    numbers: np.ndarray[Any, Any]
    is_number: np.ndarray[Any, Any]
    raw: np.ndarray[Any, Any]
    text_type: bool

    def texts(self) -> list[str | None]:
        """Converts the values to texts, None for missing ones.

        In a column of numbers or truth values each has one spelling, whatever wrote the file: 2.0 of a .parquet file
        and "2.0" of a .csv file are "2".
        """
        spell = one_spelling if self.has_only_numbers else _as_text
        return [None if gone else spell(value) for value, gone in zip(self.raw, self.missing, strict=True)]

    @property
    def has_only_numbers(self) -> bool:
        """True if every value that is not missing is a number or a truth value."""
        return bool((self.missing | self.is_number).all())


def _as_text(value: object) -> str:
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value)


# Without leading zeros: "01234" is a code, not another spelling of 1234.
_NUMBER = re.compile(r"[+-]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


def one_spelling(value: object) -> str:
    """Returns the spelling of a number or truth value that all its spellings share; other texts unchanged.

    >>> [one_spelling(value) for value in ("2.0", 2.0, 2, "+2", "2.50", "1e-7", "TRUE", True, "01234", " a")]
    ['2', '2', '2', '2', '2.5', '1e-07', 'True', 'True', '01234', ' a']
    """
    text = _as_text(value)
    if text.lower() in _TRUTH:
        return text.capitalize()
    number = text.strip()
    if not _NUMBER.fullmatch(number):
        return text
    # Not through float, which has 53 bits: identifiers have more digits.
    if number.lstrip("+-").isdigit():
        return "0" if number.lstrip("+-") == "0" else number.lstrip("+")
    return _as_text(float(number)) if math.isfinite(float(number)) else text


def places_of(categories: Sequence[str]) -> dict[str, int]:
    """Maps each spelling of each category to its index; the spelling that training saw wins.

    >>> places_of(["1", "2.5"])
    {'1.0': 0, '1': 0, '2.5': 1}
    """
    truths = all(category.lower() in _TRUTH for category in categories)
    places: dict[str, int] = {}
    for index, category in enumerate(categories):
        one = one_spelling(category)
        spellings = [one]
        if truths:
            spellings += [category.lower(), category.upper()]
        elif one.lstrip("-").isdigit():
            spellings.append(f"{one}.0")
        for spelling in spellings:
            places.setdefault(spelling, index)
    exact = {category: index for index, category in enumerate(categories)}
    return {spelling: index for spelling, index in places.items() if spelling not in exact} | exact


@dataclass(frozen=True)
class Table:
    """Pandas frame, the file it was read from, and the texts that count as missing values.

    Attributes:
        path: path of the file.
        frame: columns; those of a .csv file are all texts.
        missing: texts that count as missing, besides the empty one, e.g. {"NA", "null"}.
    """

    path: Path
    frame: Any
    missing: Collection[str] = ()
    _read: dict[tuple[str, frozenset[str]], Values] = field(default_factory=dict, repr=False, compare=False)
    """Cache of :meth:`values` by name and missing texts; copies of the table with other missing texts share it."""

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return [str(name) for name in self.frame.columns]

    def column(self, name: str) -> Any:
        """Finds a column, as a pandas series. Raises InputError: the table has no column of this name."""
        if name not in self.columns:
            raise InputError(
                f"The table '{self.path}' has no column '{name}'; its columns are {some_names(self.columns)}."
            )
        # By position: names of columns need not be texts in a .parquet file.
        return self.frame.iloc[:, self.columns.index(name)]

    def at(self, name: str, row: int) -> str:
        """Names a place in the table for messages."""
        return f"The table '{self.path}', column '{name}', row {row + 1} (without the header)"

    def values(self, name: str) -> Values:
        """Reads the values of a column. Raises InputError: it does not exist, or holds dates or other objects."""
        key = (name, frozenset(self.missing))
        if key not in self._read:
            self._read[key] = self._values(name)
        return self._read[key]

    def _values(self, name: str) -> Values:
        series = self.column(name)
        kinds = frame_library().api.types
        raw = series.to_numpy(dtype=object)
        missing = np.array(series.isna(), bool)
        if kinds.is_numeric_dtype(series.dtype) and not kinds.is_complex_dtype(series.dtype):
            missing |= self._stands_for_missing(raw, missing)
            # Nullable integers of pandas become objects without na_value.
            numbers = np.asarray(series.to_numpy(dtype=np.float64, na_value=np.nan))
            return Values(missing, np.where(missing, np.nan, numbers), ~missing, raw, text_type=False)
        of_objects = kinds.is_object_dtype(series.dtype)
        missing |= np.asarray(series.isin(["", *self.missing]), bool)
        missing |= self._stands_for_missing(raw, missing)
        if of_objects or not kinds.is_string_dtype(series.dtype):
            self._require_values(name, series, raw, missing)
        numbers, is_number = _read_numbers(raw, missing)
        # A .parquet file with a column of objects may hold texts or numbers; one text makes it a column of texts.
        is_text = not of_objects or any(isinstance(value, str) for value in raw[~missing])
        return Values(missing, numbers, is_number, raw, is_text and self.path.suffix.lower() != ".csv")

    def _stands_for_missing(
        self, raw: np.ndarray[Any, Any], missing: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        """Finds the values that are numbers among the missing texts, e.g. -999 and "-999.0" for "-999"."""
        numbers = {one_spelling(text) for text in self.missing if _NUMBER.fullmatch(text.strip())}
        found = np.zeros(len(raw), bool)
        if numbers:
            found[~missing] = [one_spelling(value) in numbers for value in raw[~missing]]
        return found

    def _require_values(
        self, name: str, series: Any, raw: np.ndarray[Any, Any], missing: np.ndarray[Any, Any]
    ) -> None:
        """Raises InputError for a column with values that are neither numbers nor texts."""
        known = str | bool | int | float | np.number | np.bool_
        dates = frame_library().api.types.is_datetime64_any_dtype(series.dtype)
        wrong = (
            row
            for row, value in enumerate(raw)
            if not missing[row] and (dates or not isinstance(value, known))
        )
        row = next(wrong, None)
        if row is not None:
            raise InputError(
                f"{self.at(name, row)}: {raw[row]!r} is neither a number nor a text. Make numbers of it, or name the "
                "columns to take: --inputs."
            )


def _read_numbers(
    raw: np.ndarray[Any, Any], missing: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Parses numbers among objects and texts; the second result is True for rows with a number.

    "inf" is a number, refused later with its place; "nan" is a text unless `--missing nan` makes it missing.
    Truth values are numbers if the column has nothing else: a category "true" among others stays a text.
    """
    present = ~missing
    numbers = np.full(len(raw), np.nan)
    values = raw[present]
    if len(values) and str(values[0]).lower() in _TRUTH:
        truth = np.array([_TRUTH.get(str(value).lower(), np.nan) for value in values])
        if not np.isnan(truth).any():
            numbers[present] = truth
            return numbers, present
    texts = np.array([str(value) for value in values], object)
    numbers[present] = frame_library().to_numeric(texts, errors="coerce")
    return numbers, present & ~np.isnan(numbers)


def read_table(path: Path) -> Table:
    """Reads a .csv or .parquet file.

    Fields of a .csv file are not converted here: an empty field is the empty text, "NA" and "null" are texts.

    Raises:
        InputError: the file cannot be read, has no rows, or two columns of one name.
    """
    pandas = frame_library()
    try:
        frame = _read_csv(pandas, path) if path.suffix.lower() == ".csv" else pandas.read_parquet(path)
    except Exception as error:
        # pandas passes on the errors of its parsers and of pyarrow, of many types.
        raise InputError(f"Reading the table '{path}': {error}") from error
    table = Table(path, frame)
    twice = {name for name in table.columns if table.columns.count(name) > 1}
    if twice or not len(frame):
        raise InputError(
            f"Reading the table '{path}': "
            + (f"there are several columns {', '.join(sorted(twice))}." if twice else "it has no rows.")
        )
    return table


def _other_separator(header: Sequence[str], first: str, second: str) -> str | None:
    """Finds what separates the fields of a table whose header has no comma; None if it is a table of one column."""
    if len(header) != 1:
        return None
    # A name of the only column may contain such a character; the next line then has another number of them.
    return next((s for s in ";\t|" if first.count(s) and first.count(s) == second.count(s)), None)


def _read_csv(pandas: Any, path: Path) -> Any:
    """Reads all fields as texts; a byte order mark, as Excel writes it, is skipped."""
    encoding = "utf-8-sig"
    with path.open(encoding=encoding, newline="") as file:
        first, second = file.readline(), file.readline()
        file.seek(0)
        header = next(csv.reader(file), [])
    if separator := _other_separator(header, first, second):
        raise ValueError(
            f"its first line is one column {header[0]!r}, so the fields seem to be separated by {separator!r}. Only "
            "commas separate fields, and numbers have a decimal point (1.5): save the table again in this way, or as "
            ".parquet"
        )
    frame = pandas.read_csv(
        path,
        dtype=str,
        # pandas takes "NA" and "None" for missing, which may be a country and a category.
        keep_default_na=False,
        na_filter=False,
        encoding=encoding,
        # In a table of one column an empty line is a row with an empty field, not a gap between rows.
        skip_blank_lines=len(header) > 1,
    )
    # Of rows with more fields than the header pandas would make an index of the first fields, without an error.
    if frame.shape[1] != len(header) or not isinstance(frame.index, pandas.RangeIndex):
        raise ValueError(f"rows have more fields than the header, which has {len(header)}")
    # pandas (3.1) renames the second of two equal names, which would hide that there are two.
    frame.columns = header
    return frame
