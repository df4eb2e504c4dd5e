"""Converts pandas and polars tables to arrays. Columns must be numeric, and have no missing values.

Neither package is imported: their objects are recognized by the module in which their class is defined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxtrain.errors import InputError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.manifest import InputSpec


def _library(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def is_frame(value: object) -> bool:
    """True for a pandas or polars DataFrame.

    Raises:
        InputError: the value is a LazyFrame.
    """
    if _library(value) not in ("pandas", "polars"):
        return False
    if type(value).__name__ == "LazyFrame":
        raise InputError("A LazyFrame is not evaluated yet; pass frame.collect().")
    return hasattr(value, "columns")


def is_series(value: object) -> bool:
    """True for a pandas or polars Series."""
    return _library(value) in ("pandas", "polars") and type(value).__name__ == "Series"


def column_names(frame: Any) -> list[str]:
    """Returns the names of the columns as strings."""
    return [str(name) for name in frame.columns]


def without(frame: Any, names: Sequence[str]) -> Any:
    """Returns a frame without the columns `names`."""
    kept = [name for name in frame.columns if str(name) not in names]
    return frame[kept]


def frame_values(word: str, specs: Sequence[InputSpec], frame: Any) -> list[Array]:
    """Converts a frame to one array per input or target, matched to columns by name.

    If there is only one input and no column has its name, it gets all columns, in the order of the frame.

    Args:
        word: "input" or "target", for error messages.
        specs: inputs or targets of the model.
        frame: a pandas or polars `DataFrame`.

    Raises:
        InputError: the columns do not match the model, are not numeric, or have missing values.
    """
    names = list(frame.columns)
    texts = column_names(frame)
    missing = [spec.name for spec in specs if spec.name not in texts]
    if not missing:
        return [series_values(word, spec, frame[names[texts.index(spec.name)]]) for spec in specs]
    wide = len(specs) == 1 and specs[0].shape is not None and len(specs[0].shape) == 2
    if not wide and not (len(specs) == 1 and len(names) == 1):
        raise InputError(
            f"The model's {word}s are {', '.join(spec.name for spec in specs)}, but the frame has no "
            f"column {', '.join(missing)}: it has {_listed(texts)}. Rename its columns, or pass a dict of "
            "arrays by name."
        )
    spec = specs[0]
    if not wide:
        return [series_values(word, spec, frame[names[0]])]
    width = spec.shape[1] if spec.shape is not None else None
    if isinstance(width, int) and width != len(names):
        raise InputError(
            f"The {word} '{spec.name}' takes {width} columns, but the frame has {len(names)}: "
            f"{_listed(texts)}. Choose the columns in the model's order: frame[[...]]."
        )
    dtype = spec.dtype.held
    # Column by column, because the frame's own conversion may go through float64 or objects.
    table = np.empty((len(frame), len(names)), dtype if dtype.kind in "fiu" else np.float32)
    for index, name in enumerate(names):
        column = _numbers(frame[name], f"column '{name}'")
        if table.dtype.kind in "iu" and column.dtype.kind == "f":
            raise InputError(
                f"The column '{name}' is {column.dtype}, but the {word} '{spec.name}' takes {table.dtype}. "
                f"If you mean to convert it, use .astype('{table.dtype}')."
            )
        with np.errstate(over="ignore"):
            table[:, index] = column
        if table.dtype.kind in "iu" and not np.array_equal(table[:, index], column):
            raise InputError(f"The column '{name}' contains values that do not fit into {table.dtype}.")
        if not np.array_equal(np.isinf(table[:, index]), np.isinf(column)):
            raise InputError(
                f"The column '{name}' contains values too large for {table.dtype}; scale the data."
            )
    return [table]


def series_values(word: str, spec: InputSpec, series: Any) -> Array:
    """Converts a column to an array, of rank 2 if the model expects rank 2.

    Args:
        word: "input" or "target", for error messages.
        spec: the input or target.
        series: a pandas or polars column.

    Raises:
        InputError: the column is not numeric, or has missing values.
    """
    label = f"column '{series.name}'" if series.name is not None else f"{word} '{spec.name}'"
    values = _numbers(series, label)
    dtype = spec.dtype.held
    # Columns of integers are often quantities, which pandas reads as integers.
    if dtype.kind == "f" and values.dtype.kind in "iub":
        values = values.astype(dtype)
    if spec.shape is not None and len(spec.shape) == 2 and spec.shape[1] in (1, None) and values.ndim == 1:
        values = values[:, None]
    return values


def _numbers(series: Any, label: str) -> Array:
    """Converts a pandas or polars column to an array.

    Args:
        series: the column.
        label: description of the column for error messages, e.g. "column 'age'".

    Raises:
        InputError: the column is not numeric, or has missing or infinite values.
    """
    polars = _library(series) == "polars"
    missing = np.asarray(series.is_null() if polars else series.isna())
    # polars distinguishes null from NaN, pandas does not; both count as missing.
    if polars and series.dtype.is_float():
        missing = missing | np.asarray(series.is_nan().fill_null(False))
    if missing.any():
        raise InputError(
            f"The {label} has no value in {_place(series, missing, polars)} ({int(missing.sum())} "
            f"missing). Fill them ({'frame.fill_null(...)' if polars else 'frame.fillna(...)'}) or drop "
            f"such rows ({'frame.drop_nulls()' if polars else 'frame.dropna()'})."
        )
    kind = str(series.dtype)
    numeric = (
        series.dtype.is_numeric() or kind == "Boolean"
        if polars
        else getattr(series.dtype, "kind", "O") in "iufb"
    )
    if not numeric:
        raise InputError(_encoding(series, label, kind, polars))
    values = series.to_numpy()
    # Nullable pandas dtypes (Int64, Float64) become object arrays; no value is missing at this point.
    if values.dtype == object:
        values = values.astype(np.float64 if getattr(series.dtype, "kind", "f") == "f" else np.int64)
    array = np.asarray(values)
    infinite = np.isinf(array) if array.dtype.kind == "f" else np.zeros(0, bool)
    if infinite.any():
        raise InputError(
            f"The {label} is infinite in {_place(series, infinite, polars)} ({int(infinite.sum())} such "
            "values). Replace the values with the largest plausible number, or drop such rows."
        )
    return array


def _place(series: Any, wrong: Array, polars: bool) -> str:
    """Describes the first row with a rejected value, for error messages, e.g. "row 3".

    Args:
        series: the column.
        wrong: bool [rows]; True for rejected values.
        polars: True for a polars column, False for a pandas column.
    """
    # After a selection, row number and pandas index differ; the message contains both.
    row = int(np.flatnonzero(wrong)[0])
    index = None if polars else series.index[row]
    return f"row {row}" if index is None or index == row else f"row {row} (index {index!r})"


_OF_POLARS = (
    "frame.to_dummies('name') creates one column per value, "
    "frame['name'].cast(polars.Categorical).to_physical() one number per value"
)
_OF_PANDAS = (
    "pandas.get_dummies(frame, columns=['name'], dtype='float32') creates one column per value, "
    "pandas.factorize(frame['name'])[0] one number per value"
)


def _encoding(series: Any, label: str, kind: str, polars: bool) -> str:
    """Returns the error message for a column that is not numeric, with advice on encoding it.

    Args:
        series: the column.
        label: description of the column, e.g. "column 'town'".
        kind: dtype of the column, e.g. "object".
        polars: True for a polars column, False for a pandas column.
    """
    shown = f" such as {series[0]!r}" if polars and len(series) else ""
    if not polars and len(series):
        shown = f" such as {series.iloc[0]!r}"
    if "date" in kind.lower() or "time" in kind.lower() or kind.lower().startswith("duration"):
        return f"The {label} contains times ({kind}{shown}), not numbers. Convert it, e.g. to seconds since a date."
    how = _OF_POLARS if polars else _OF_PANDAS
    return f"The {label} contains categories or strings ({kind}{shown}), not numbers. Encode it first: {how}."


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:20])
    return f"{shown}, ... ({len(names)} columns)" if len(names) > 20 else shown
