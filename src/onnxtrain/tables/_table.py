"""Reads tables and the values of their columns."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from onnxtrain._names import enumerated
from onnxtrain._words import argument
from onnxtrain.errors import InputError, MissingPackageError
from onnxtrain.selection import some_names
from onnxtrain.tables._dialect import Decimal, Dialect, Given, respelled
from onnxtrain.tables._spelling import BOOLEANS, as_text, canonical_spelling, spells_number
from onnxtrain.tables._text_file import read_text_file

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
        raw: object [rows]; the values as stored in the `DataFrame`. From a text file, all are strings; if all are
            numbers, they have a decimal point and no separators of thousands.
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
        return f"The table '{self.source}', column '{self.name}', row {row + 1} (counted from 1, without the header)"

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
    `Table(pandas.read_csv("log.csv", comment="#"))`.

    Attributes:
        frame: pandas `DataFrame`.
        source: name of the table in error messages, e.g. the path of its file.
        typed: True if the dtypes of the frame distinguish numbers from strings. False if all values are strings,
            which may contain numbers, as in a .csv file.
        dialect: dialect of the text file that the table was read from; None for other tables.

    Raises:
        InputError: the frame has no rows, or two columns with the same name.

    >>> import pandas
    >>> Table(pandas.DataFrame({"age": [30, 41], "sex": ["female", "male"]})).columns
    ['age', 'sex']
    """

    frame: Any
    source: str = "table"
    typed: bool = True
    dialect: Dialect | None = None
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
        spelled, refused = raw, np.zeros(len(raw), bool)
        if self.dialect is not None:
            spelled = raw.copy()
            spelled[~missing], refused[~missing] = respelled(raw[~missing], self.dialect.decimal)
        missing |= _spelled_as(missing_texts, spelled, missing)
        numbers, is_number = _parse_numbers(spelled, missing | refused)
        if (is_number | missing).all():
            raw = spelled
        # An object column may contain strings or numbers; a single string makes it a string column.
        is_text = not has_objects or any(isinstance(value, str) for value in raw[~missing])
        values = Values(name, self.source, missing, numbers, is_number, raw, is_text and self.typed)
        if has_objects or not kinds.is_string_dtype(series.dtype):
            _require_numbers_or_texts(values, dates=kinds.is_datetime64_any_dtype(series.dtype))
        return values


TableLike: TypeAlias = Any
"""A :class:`Table`, a path, a pandas `DataFrame`, or an object with `to_pandas` (polars, pyarrow, datasets)."""


def as_table(data: TableLike, like: Dialect | None = None) -> Table:
    """Converts a path, a pandas `DataFrame` or an object with `to_pandas` to a :class:`Table`; returns tables as is.

    Args:
        data: the table.
        like: dialect of an earlier table, to read what a file leaves open.
    """
    if isinstance(data, Table):
        return data
    if isinstance(data, str | os.PathLike):
        return read_table(Path(data), like=like)
    return Table(data.to_pandas() if hasattr(data, "to_pandas") else data)


def read_table(
    path: str | os.PathLike[str],
    *,
    separator: str | None = None,
    decimal: Decimal | None = None,
    encoding: str | None = None,
    like: Dialect | None = None,
) -> Table:
    """Reads a .csv, .tsv or .parquet file with a header.

    The separator, decimal mark and encoding of a text file are recognized. If the file can be read in two ways, an
    error names the argument to pass. Text files may be compressed (.csv.gz, .tsv.gz). Fields are kept as strings:
    "NA", "null" and "007" are strings, and only an empty field is a missing value.

    Args:
        path: path of the file; the suffix determines the format.
        separator: character between fields, e.g. ";", or "comma", "semicolon", "tab", "pipe" or "space". None to
            recognize a comma, semicolon, tab or pipe.
        decimal: decimal mark of numbers, "." or ",". The other one may separate thousands. None to recognize it.
        encoding: encoding of the text, e.g. "cp1252". None for UTF-8, or UTF-16 and UTF-32 with a byte order mark.
        like: dialect of an earlier table, e.g. `encoder.dialect_`, to read what this file leaves open.

    Raises:
        InputError: the file cannot be read or can be read in several ways, has no rows, or has two columns with the
            same name.
        MissingPackageError: pandas is not installed.
    """
    path = Path(path)
    given = Given(separator, decimal, encoding).checked()
    suffix = table_suffix(path)
    if suffix is None:
        raise InputError(
            f"Reading the table '{path}': the file name must end in {enumerated(list(TABLE_SUFFIXES))}."
        )
    pandas = _pandas()
    try:
        frame, dialect = READERS[suffix](pandas, path, given, like)
    except Exception as error:
        # pandas passes on the errors of its parsers and of pyarrow, which have many types.
        raise InputError(f"Reading the table '{path}': {error}") from error
    return Table(frame, str(path), typed=dialect is None, dialect=dialect)


def table_suffix(path: Path) -> str | None:
    """Returns the suffix of a table's file, e.g. ".csv.gz"; None if :func:`read_table` cannot read the file.

    >>> table_suffix(Path("sales.2024.CSV.gz")), table_suffix(Path("sales.xlsx"))
    ('.csv.gz', None)
    """
    # The longest first: none of the suffixes is the end of another one.
    return next((suffix for suffix in TABLE_SUFFIXES if path.name.lower().endswith(suffix)), None)


def _read_parquet(pandas: Any, path: Path, given: Given, like: Dialect | None) -> tuple[Any, Dialect | None]:
    if any(given):
        names = [name for name, value in given._asdict().items() if value is not None]
        raise ValueError(f"{', '.join(map(argument, names))} are for text files such as .csv")
    return pandas.read_parquet(path), None


Read: TypeAlias = Callable[[Any, Path, Given, Dialect | None], tuple[Any, Dialect | None]]
"""Function `(pandas, path, given, like)` that returns a `DataFrame` and the dialect of its text; the dialect is None if
the format distinguishes numbers from strings. Its exceptions are converted to InputError."""

READERS: dict[str, Read] = {
    ".csv": partial(read_text_file, tabs=False),
    ".tsv": partial(read_text_file, tabs=True),
    ".csv.gz": partial(read_text_file, tabs=False),
    ".tsv.gz": partial(read_text_file, tabs=True),
    ".parquet": _read_parquet,
}
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
