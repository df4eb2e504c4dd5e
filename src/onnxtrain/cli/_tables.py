"""Tables as arrays: which columns, and how texts and missing values become numbers.

What training has learned of a table (categories, means, names of the classes) is kept in the run, so that evaluation
and prediction do the same with theirs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.runtime.json_text import parse_json
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.selection import some_names

__all__ = ["PROPERTY", "TABLE_SUFFIXES", "Encoding", "Table", "TableOptions", "frame_library", "read_table"]

TABLE_SUFFIXES = (".csv", ".parquet")

PROPERTY = "onnxtrain.cli.table"
"""Name of the checkpoint property that holds the encoding, as JSON text."""

_NUMBER, _ONE_HOT, _ORDINAL = "number", "one-hot", "ordinal"


@dataclass(frozen=True)
class Table:
    """A pandas frame and the file that it is from."""

    path: Path
    frame: Any

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return [str(name) for name in self.frame.columns]

    def column(self, name: str) -> Any:
        """Returns a column as a pandas series.

        Raises:
            InputError: there is none of this name.
        """
        if name not in self.columns:
            raise InputError(
                f"The table '{self.path}' has no column '{name}'; its columns are {some_names(self.columns)}."
            )
        return self.frame.iloc[:, self.columns.index(name)]

    def at(self, name: str, row: int) -> str:
        """Returns how messages call a place."""
        return f"The table '{self.path}', column '{name}', row {row + 1} (without the header)"


def frame_library() -> Any:
    """Returns pandas.

    Raises:
        InputError: it is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise InputError("Tables need pandas: pip install 'onnxtrain[data]'.") from error
    return pandas


def read_table(path: Path) -> Table:
    """Returns the table of a .csv or .parquet file.

    Raises:
        InputError: it cannot be read, has no rows, or two columns of one name.
    """
    pandas = frame_library()
    try:
        frame = pandas.read_csv(path) if path.suffix.lower() == ".csv" else pandas.read_parquet(path)
    except Exception as error:  # pandas lets errors of its parsers and of pyarrow through
        raise InputError(f"Reading the table '{path}': {error}") from error
    table = Table(path, frame)
    twice = {name for name in table.columns if table.columns.count(name) > 1}
    if twice or not len(frame):
        raise InputError(
            f"Reading the table '{path}': "
            + (f"there are several columns {', '.join(sorted(twice))}." if twice else "it has no rows.")
        )
    return table


@dataclass(frozen=True)
class TableOptions:
    """What the options of a command say of a table."""

    target: list[str] | None = None
    inputs: list[str] | None = None
    impute: str | None = None
    one_hot: bool = False
    ordinal: bool = False
    scale: bool = False

    def check(self) -> None:
        """Raises InputError for options that do not go together."""
        if self.impute not in (None, "mean", "median"):
            raise InputError(f"--impute is {self.impute!r}; choose mean or median.")
        if self.one_hot and self.ordinal:
            raise InputError(
                "--one-hot and --ordinal are two ways to encode the same columns; give one of them."
            )

    def given(self) -> list[str]:
        """Returns the options that were given, as on the command line."""
        return [f"--{name.replace('_', '-')}" for name, value in asdict(self).items() if value]


@dataclass(frozen=True)
class Column:
    """How one column becomes numbers.

    Attributes:
        name: of the column.
        kind: "number", "one-hot" or "ordinal".
        categories: in the order of their numbers.
        fill: what stands for a missing value; None if there must be none.
        mean, deviation: what is subtracted from a number, and what it is then divided by.
    """

    name: str
    kind: str
    categories: list[str] | None = None
    fill: float | str | None = None
    mean: float = 0.0
    deviation: float = 1.0

    @classmethod
    def learn(cls, table: Table, name: str, options: TableOptions) -> Column:
        """Returns how a column of training data is to be encoded.

        Raises:
            InputError: it holds what the options do not say how to encode.
        """
        series = table.column(name)
        if _is_number(series):
            values = _numbers(series)
            known = values[~np.isnan(values)]
            if not len(known):
                raise InputError(
                    f"The table '{table.path}': column '{name}' has no values. Leave it out: --inputs."
                )
            fill = None if options.impute is None else float(getattr(np, options.impute)(known))
            if fill is not None:
                known = np.where(np.isnan(values), fill, values)
            column = cls(name, _NUMBER, fill=fill)
            if options.scale:
                column = replace(column, mean=float(known.mean()), deviation=float(known.std()) or 1.0)
            return column
        texts = _texts(table, name, series)
        if not (options.one_hot or options.ordinal):
            row = _first_text(series)
            raise InputError(
                f"{table.at(name, row)}: {series.iloc[row]!r} is no number. Encode columns of texts by --one-hot or "
                "--ordinal, or name the columns to take: --inputs."
            )
        present = [text for text in texts if text is not None]
        categories = sorted(set(present))
        fill_text = max(categories, key=present.count) if options.impute else None
        return cls(name, _ONE_HOT if options.one_hot else _ORDINAL, categories, fill_text)

    @property
    def width(self) -> int:
        """Number of numbers that the column becomes."""
        return len(self.categories or ()) if self.kind == _ONE_HOT else 1

    def numbers(self, table: Table) -> np.ndarray[Any, Any]:
        """Returns the numbers of the column, float64 [rows, width].

        Raises:
            InputError: a value is missing, or is none that was there in training.
        """
        series = table.column(self.name)
        missing = np.asarray(series.isna(), bool)
        if missing.any() and self.fill is None:
            raise InputError(
                f"{table.at(self.name, int(missing.argmax()))}: the value is missing. Fill such values by "
                "--impute mean or --impute median when training, or remove the rows."
            )
        if self.kind == _NUMBER:
            if not _is_number(series):
                row = _first_text(series)
                raise InputError(f"{table.at(self.name, row)}: {series.iloc[row]!r} is no number.")
            values = np.where(missing, self.fill if self.fill is not None else 0.0, _numbers(series))
            return np.asarray((values - self.mean) / self.deviation)[:, None]
        assert self.categories is not None
        numbers = {category: index for index, category in enumerate(self.categories)}
        texts = [self.fill if text is None else text for text in _texts(table, self.name, series)]
        unknown = next((row for row, text in enumerate(texts) if text not in numbers), None)
        if unknown is not None:
            raise InputError(
                f"{table.at(self.name, unknown)}: {texts[unknown]!r} is none of the categories of training: "
                f"{some_names(self.categories)}."
            )
        indices = np.array([numbers[str(text)] for text in texts])
        if self.kind == _ORDINAL:
            return indices.astype(np.float64)[:, None]
        return np.asarray(np.eye(len(numbers))[indices])


@dataclass(frozen=True)
class Encoding:
    """How a table becomes arrays.

    Attributes:
        columns: of the inputs, in their order.
        targets: names of the columns of the target.
        classes: the names of the classes, where the target has texts; their numbers are their places.
    """

    columns: list[Column]
    targets: list[str]
    classes: list[str] | None = None

    @classmethod
    def learn(cls, table: Table, options: TableOptions, targets: Sequence[InputSpec]) -> Encoding:
        """Returns the encoding for a table to train on.

        Raises:
            InputError: a column is missing, or holds what the options do not say how to encode.
        """
        options.check()
        wanted = _names(options.target, table)
        if bool(targets) != bool(wanted):
            raise InputError(
                f"The table '{table.path}': name the column to learn by --target; its columns are "
                f"{some_names(table.columns)}."
                if targets
                else "The model computes its loss from its inputs alone; leave --target out."
            )
        inputs = _names(options.inputs, table) or [name for name in table.columns if name not in wanted]
        if both := sorted(set(inputs) & set(wanted)):
            raise InputError(f"{', '.join(both)} cannot be among --inputs and be the --target.")
        columns = [Column.learn(table, name, options) for name in inputs]
        classes = None
        if targets and targets[0].class_labels is not None and not _is_number(table.column(wanted[0])):
            classes = sorted(
                {text for text in _texts(table, wanted[0], table.column(wanted[0])) if text is not None}
            )
        return cls(columns, wanted, classes)

    @classmethod
    def from_json(cls, text: str, source: str) -> Encoding:
        """Returns what :meth:`to_json` gave.

        Raises:
            CheckpointError: it is damaged; `source` names the run.
        """
        try:
            content = parse_json(text)
            if content["version"] != 1:
                raise ValueError(f"version {content['version']}")
            columns = [Column(**column) for column in content["columns"]]
            return cls(columns, [str(name) for name in content["targets"]], content["classes"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"Reading the run '{source}': its property '{PROPERTY}' is no encoding of a table ({error})."
            ) from error

    def to_json(self) -> str:
        """Returns JSON text; floats are kept exactly."""
        return json.dumps({"version": 1, **asdict(self)})

    def arrays(
        self, table: Table, inputs: Sequence[InputSpec], targets: Sequence[InputSpec]
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Returns the arrays for a model's inputs and targets.

        Raises:
            InputError: the table does not fit.
        """
        blocks = [column.numbers(table) for column in self.columns]
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        if len(inputs) == 1:
            arrays[inputs[0].name] = _fitted(np.concatenate(blocks, axis=1), inputs[0], self.columns, table)
        else:
            for spec in inputs:
                own = [i for i, column in enumerate(self.columns) if column.name == spec.name]
                if not own:
                    names = ", ".join(item.name for item in inputs)
                    raise InputError(
                        f"The model has several inputs ({names}), each of which is the column of its name; the table "
                        f"'{table.path}' has no column '{spec.name}' among its inputs."
                    )
                arrays[spec.name] = _fitted(blocks[own[0]], spec, [self.columns[own[0]]], table)
        if targets:
            arrays[targets[0].name] = self._target(table, targets[0])
        return arrays

    def _target(self, table: Table, spec: InputSpec) -> np.ndarray[Any, Any]:
        columns = []
        for name in self.targets:
            series = table.column(name)
            missing = np.asarray(series.isna(), bool)
            if missing.any():
                raise InputError(
                    f"{table.at(name, int(missing.argmax()))}: the target is missing. Remove such rows."
                )
            if self.classes is not None:
                column = Column(name, _ORDINAL, self.classes)
                columns.append(column.numbers(table)[:, 0].astype(np.int64))
                continue
            values = Column(name, _NUMBER).numbers(table)[:, 0]
            whole = spec.class_labels is not None and (values == np.floor(values)).all()
            columns.append(values.astype(np.int64) if whole else values)
        array = np.stack(columns, axis=1)
        rank = None if spec.shape is None else len(spec.shape)
        return array[:, 0] if array.shape[1] == 1 and rank in (None, 1) else array


def _fitted(
    block: np.ndarray[Any, Any], spec: InputSpec, columns: Sequence[Column], table: Table
) -> np.ndarray[Any, Any]:
    """Returns the numbers of some columns in the shape and type of an input."""
    shape = spec.shape
    if shape is not None and len(shape) == 1 and block.shape[1] == 1:
        block = block[:, 0]
    width = shape[1] if shape is not None and len(shape) == 2 else None
    if isinstance(width, int) and width != block.shape[1]:
        made = some_names([c.name if c.width == 1 else f"{c.name} ({c.width})" for c in columns])
        raise InputError(
            f"The table '{table.path}' gives {block.shape[1]} numbers per row ({made}), and the input '{spec.name}' of "
            f"the model takes {width}. Choose columns by --inputs."
        )
    kind = spec.dtype.storage.kind
    return block.astype(np.int64) if kind in "iu" and (block == np.floor(block)).all() else block


def _names(given: list[str] | None, table: Table) -> list[str]:
    """Returns the columns that options name: each is a column, or several with commas between."""
    names: list[str] = []
    for text in given or ():
        names += (
            [text] if text in table.columns else [name.strip() for name in text.split(",") if name.strip()]
        )
    for name in names:
        table.column(name)
    return names


def _is_number(series: Any) -> bool:
    types = frame_library().api.types
    return bool(types.is_numeric_dtype(series.dtype) and not types.is_complex_dtype(series.dtype))


def _numbers(series: Any) -> np.ndarray[Any, Any]:
    return np.asarray(series.to_numpy(dtype=np.float64, na_value=np.nan))


def _texts(table: Table, name: str, series: Any) -> list[str | None]:
    """Returns the values of a column of texts, None for missing ones.

    Raises:
        InputError: it holds dates or other objects.
    """
    kinds = frame_library().api.types
    values = [None if gone else value for value, gone in zip(series, series.isna(), strict=True)]
    wrong = next(
        (
            row
            for row, value in enumerate(values)
            if value is not None and not isinstance(value, str | bool | int | float | np.generic)
        ),
        None,
    )
    if kinds.is_datetime64_any_dtype(series.dtype) or wrong is not None:
        raise InputError(
            f"{table.at(name, wrong or 0)}: {series.iloc[wrong or 0]!r} is neither a number nor a text. Make "
            "numbers of it, or name the columns to take: --inputs."
        )
    return [None if value is None else str(value) for value in values]


def _first_text(series: Any) -> int:
    """Returns the first row whose value is no number."""
    pandas = frame_library()
    numbers = pandas.to_numeric(series.astype(object), errors="coerce")
    wrong = np.asarray(numbers.isna() & series.notna(), bool)
    return int(wrong.argmax())
