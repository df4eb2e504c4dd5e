"""Reads tables and the values of their columns."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from onnxtrain._words import argument
from onnxtrain.errors import InputError, MissingPackageError
from onnxtrain.selection import some_names
from onnxtrain.tables._spelling import BOOLEANS, as_text, canonical_spelling, spells_number

Array: TypeAlias = np.ndarray[Any, Any]


# Imported lazily, because `import onnxtrain.tables` and training on arrays do not need pandas.
def _pandas() -> Any:
    """Imports pandas and returns it. Raises MissingPackageError if it is not installed."""
    try:
        import pandas
    except ImportError as error:
        raise MissingPackageError("Tables need pandas: pip install 'onnxtrain[data]'.") from error
    return pandas


@dataclass(frozen=True)
class Values:
    """Values of one column.

    Attributes:
        name: name of the column.
        source: name of the table, for error messages.
        missing: bool [rows]; True for a missing value.
        numbers: float64 [rows]; NaN where `is_number` is False.
        is_number: bool [rows]; True for numbers and Booleans (0 and 1), False for a missing value.
        raw: object [rows]; the values as stored in the `DataFrame`. From a .csv file, all are strings.
        text_type: True if the table distinguishes strings from numbers (see :attr:`Table.typed`), and this is a string
            column.
    """

    name: str
    source: str
    missing: Array
    numbers: Array
    is_number: Array
    raw: Array
    text_type: bool

    def at(self, row: int) -> str:
        """Returns the table, column and row of a value as a prefix for error messages. `row` is counted from 0."""
        return f"The table '{self.source}', column '{self.name}', row {row + 1} (without the header)"

    def texts(self) -> list[str | None]:
        """Returns the values as strings, with None for missing values.

        If all values are numbers or Booleans, they are written in canonical form: 2.0 in a .parquet file and "2.0" in a
        .csv file both become "2".
        """
        spell = canonical_spelling if self.has_only_numbers else as_text
        return [None if gone else spell(value) for value, gone in zip(self.raw, self.missing, strict=True)]

    @property
    def has_only_numbers(self) -> bool:
        """True if every value that is not missing is a number or a Boolean."""
        return bool((self.missing | self.is_number).all())


@dataclass(frozen=True)
class Table:
    """A table: a pandas `DataFrame`, with a name for error messages.

    If a file needs settings that :func:`read_table` does not have, read it with pandas yourself, e.g.
    `Table(pandas.read_csv("eu.csv", sep=";", decimal=","))`.

    Attributes:
        frame: pandas `DataFrame`.
        source: name of the table in error messages, e.g. the path of its file.
        typed: True if the dtypes of the frame distinguish numbers from strings. False if all values are strings,
            which may contain numbers, as in a .csv file.

    Raises:
        InputError: the frame has no rows, or two columns with the same name.

    >>> import pandas
    >>> Table(pandas.DataFrame({"age": [30, 41], "sex": ["female", "male"]})).columns
    ['age', 'sex']
    """

    frame: Any
    source: str = "table"
    typed: bool = True
    _cache: dict[tuple[str, frozenset[str]], Values] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        duplicates = sorted(name for name, count in Counter(self.columns).items() if count > 1)
        if duplicates:
            raise InputError(
                f"The table '{self.source}': several columns have the same name: {some_names(duplicates)}. "
                "Rename them."
            )
        if not len(self):
            raise InputError(f"The table '{self.source}' has no rows.")

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return [str(name) for name in self.frame.columns]

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.frame)

    def column(self, name: str) -> Any:
        """Returns a column as a pandas `Series`. Raises InputError if there is no column of this name."""
        if name not in self.columns:
            raise InputError(
                f"The table '{self.source}' has no column '{name}'; its columns are {some_names(self.columns)}."
            )
        # By position, because column names in a .parquet file are not always strings.
        return self.frame.iloc[:, self.columns.index(name)]

    def values(self, name: str, missing: Collection[str] = ()) -> Values:
        """Returns the values of a column.

        Args:
            name: name of the column.
            missing: strings that stand for a missing value, in addition to the empty string, e.g. ["NA", "-999"].

        Raises:
            InputError: the column does not exist, or contains dates or other objects.
        """
        key = (name, frozenset(missing))
        if key not in self._cache:
            self._cache[key] = self._read(name, missing)
        return self._cache[key]

    def _read(self, name: str, missing_texts: Collection[str]) -> Values:
        series = self.column(name)
        kinds = _pandas().api.types
        raw = series.to_numpy(dtype=object)
        missing = np.array(series.isna(), bool)
        if kinds.is_numeric_dtype(series.dtype) and not kinds.is_complex_dtype(series.dtype):
            missing |= _spelled_as(missing_texts, raw, missing)
            # Without na_value, pandas' nullable integers become objects.
            numbers = np.asarray(series.to_numpy(dtype=np.float64, na_value=np.nan))
            numbers = np.where(missing, np.nan, numbers)
            return Values(name, self.source, missing, numbers, ~missing, raw, text_type=False)
        has_objects = kinds.is_object_dtype(series.dtype)
        missing |= np.asarray(series.isin(["", *missing_texts]), bool)
        missing |= _spelled_as(missing_texts, raw, missing)
        numbers, is_number = _parse_numbers(raw, missing)
        # An object column may contain strings or numbers; a single string makes it a string column.
        is_text = not has_objects or any(isinstance(value, str) for value in raw[~missing])
        values = Values(name, self.source, missing, numbers, is_number, raw, is_text and self.typed)
        if has_objects or not kinds.is_string_dtype(series.dtype):
            _require_numbers_or_texts(values, dates=kinds.is_datetime64_any_dtype(series.dtype))
        return values


TableLike: TypeAlias = Any
"""A :class:`Table`, a path, a pandas `DataFrame`, or an object with `to_pandas` (polars, pyarrow, datasets)."""


def as_table(data: TableLike) -> Table:
    """Converts a path, a pandas `DataFrame` or an object with `to_pandas` to a :class:`Table`; returns tables as is."""
    if isinstance(data, Table):
        return data
    if isinstance(data, str | os.PathLike):
        return read_table(Path(data))
    return Table(data.to_pandas() if hasattr(data, "to_pandas") else data)


def read_table(path: str | os.PathLike[str]) -> Table:
    """Reads a .csv or .parquet file with a header.

    The fields of a .csv file are separated by commas and are kept as strings: "NA", "null" and "007" are strings, and
    only an empty field is a missing value. A byte order mark is skipped.

    Args:
        path: path of the file; the suffix determines the format.

    Raises:
        InputError: the file cannot be read, has no rows, or has two columns with the same name.
        MissingPackageError: pandas is not installed.
    """
    path = Path(path)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"Reading the table '{path}': the file name must end in {' or '.join(READERS)}.")
    pandas = _pandas()
    try:
        frame = reader.read(pandas, path)
    except Exception as error:
        # pandas passes on the errors of its parsers and of pyarrow, which have many types.
        raise InputError(f"Reading the table '{path}': {error}") from error
    return Table(frame, str(path), reader.typed)


def _read_csv(pandas: Any, path: Path) -> Any:
    """Reads a .csv file into a `DataFrame` of strings."""
    # Excel begins files with a byte order mark.
    encoding = "utf-8-sig"
    with path.open(encoding=encoding, newline="") as file:
        first, second = file.readline(), file.readline()
        file.seek(0)
        header = next(csv.reader(file), [])
    if separator := _other_separator(header, first, second):
        raise ValueError(
            f"its header is a single column {header[0]!r}, so its fields seem to be separated by "
            f"{separator!r}. Fields must be separated by commas, and numbers need a decimal point (1.5): "
            "save the table in this format, or as .parquet"
        )
    frame = pandas.read_csv(
        path,
        dtype=str,
        # By default pandas reads "NA" (Namibia) and "None" as missing.
        keep_default_na=False,
        na_filter=False,
        encoding=encoding,
        # In a table of one column an empty line is a row with a missing value.
        skip_blank_lines=len(header) > 1,
    )
    # If rows have more fields than the header, pandas silently uses the first fields as an index.
    if frame.shape[1] != len(header) or not isinstance(frame.index, pandas.RangeIndex):
        raise ValueError(f"rows have more fields than the header, which has {len(header)}")
    # pandas renames the second of two equal names ("a", "a.1"), which would hide the duplicate.
    frame.columns = header
    return frame


def _other_separator(header: Sequence[str], first: str, second: str) -> str | None:
    """Guesses the separator of a .csv file whose header contains no comma.

    Args:
        header: the header, split at commas.
        first: the first line of the file.
        second: the second line of the file.

    Returns:
        The separator; None if the header contains commas, or the file really has a single column.
    """
    if len(header) != 1:
        return None
    # The name of a single column may contain a separator; the next line then has a different number of them.
    return next((s for s in ";\t|" if first.count(s) and first.count(s) == second.count(s)), None)


def _read_parquet(pandas: Any, path: Path) -> Any:
    return pandas.read_parquet(path)


class Reader(NamedTuple):
    """Reader of one file format.

    Attributes:
        read: function `(pandas, path)` that returns a `DataFrame`; its exceptions are converted to InputError.
        typed: True if the format distinguishes numbers from strings.
    """

    read: Callable[[Any, Path], Any]
    typed: bool


READERS = {".csv": Reader(_read_csv, typed=False), ".parquet": Reader(_read_parquet, typed=True)}
"""Readers by file suffix."""

TABLE_SUFFIXES = tuple(READERS)
"""Suffixes of the files that :func:`read_table` reads."""


def _spelled_as(texts: Collection[str], raw: Array, missing: Array) -> Array:
    """Finds the values in a column that equal a number in `texts`: "-999" matches -999 and "-999.0".

    Args:
        texts: strings to look for; strings that are not numbers are ignored.
        raw: values of the column, object [rows].
        missing: bool [rows]; True for missing values, which match nothing.

    Returns:
        True for each match, bool [rows].
    """
    numbers = {canonical_spelling(text) for text in texts if spells_number(text)}
    found = np.zeros(len(raw), bool)
    if numbers:
        found[~missing] = [canonical_spelling(value) in numbers for value in raw[~missing]]
    return found


def _parse_numbers(raw: Array, missing: Array) -> tuple[Array, Array]:
    """Parses numbers in an array of objects.

    "inf" is a number; the encoding rejects it later, with an error that names its row. "nan" is a string unless it is
    declared as missing. Booleans are numbers only if the column contains nothing else: "true" may be one of several
    categories.

    Args:
        raw: values of the column, object [rows].
        missing: bool [rows]; True for missing values, which are not parsed.

    Returns:
        The numbers, float64 [rows] with NaN for other values, and a mask of the rows that contain a number.
    """
    present = ~missing
    numbers = np.full(len(raw), np.nan)
    values = raw[present]
    if len(values) and str(values[0]).lower() in BOOLEANS:
        booleans = np.array([BOOLEANS.get(str(value).lower(), np.nan) for value in values])
        if not np.isnan(booleans).any():
            numbers[present] = booleans
            return numbers, present
    texts = np.array([str(value) for value in values], object)
    numbers[present] = _pandas().to_numeric(texts, errors="coerce")
    return numbers, present & ~np.isnan(numbers)


def _require_numbers_or_texts(values: Values, *, dates: bool) -> None:
    """Raises InputError if a column contains dates, lists or other objects.

    Args:
        values: values of the column.
        dates: True if the column has a datetime dtype.
    """
    allowed = str | bool | int | float | np.number | np.bool_
    for row, value in enumerate(values.raw):
        if not values.missing[row] and (dates or not isinstance(value, allowed)):
            raise InputError(
                f"{values.at(row)}: {value!r} is neither a number nor a string. Convert it to a number, or "
                f"choose the columns to use: {argument('inputs')}."
            )
