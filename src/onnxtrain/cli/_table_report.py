"""Prints how a table is read: the encoding of each column, missing values, and the shares of the classes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onnxtrain.cli._output import info, info_table, table
from onnxtrain.tables._columns import NUMBER, ONE_HOT, Column, likely_missing
from onnxtrain.tables._encoder import Encoding
from onnxtrain.tables._table import Table


def share(count: int, total: int) -> str:
    """Formats a share in per cent.

    >>> share(28, 400)
    '7.0 %'
    """
    return f"{100 * count / max(total, 1):.1f} %"


def column_rows(data: Table, encoding: Encoding) -> list[dict[str, Any]]:
    """Describes each input column: its name, its encoding, and how many missing values are filled by which value."""
    # The texts that count as missing are those of training, whatever the options of this command.
    data = replace(data, missing=encoding.missing)
    return [
        {
            "column": column.name,
            "encoding": described(column),
            "missing": int(data.values(column.name).missing.sum()),
            "filled_by": column.fill,
        }
        for column in encoding.columns
    ]


def described(column: Column) -> str:
    """Describes the encoding of a column, e.g. "3 categories, one-hot"."""
    if column.kind == NUMBER:
        scaled = (column.mean, column.deviation) != (0.0, 1.0)
        return (
            f"number, standardised: mean {column.mean:.5g}, deviation {column.deviation:.5g}"
            if scaled
            else "number"
        )
    count = len(column.categories or ())
    encoding = "one-hot" if column.kind == ONE_HOT else "as numbers 0, 1, ..."
    others = {"error": "", "ignore": ", others as zeros", "own": ", one more for others"}[column.unknown]
    return f"{count} categories, {encoding}{others}"


def tell_of_table(data: Table, encoding: Encoding, labels: np.ndarray[Any, Any] | None) -> None:
    """Prints to standard error how a table is encoded, and how many samples each class has.

    Args:
        data: table that is trained on.
        encoding: encoding learned from the table.
        labels: class numbers of the rows; None for a target without classes.
    """
    rows = [
        (
            row["column"],
            row["encoding"],
            f"{row['missing']:,}",
            (f"{row['filled_by']:.5g}" if isinstance(row["filled_by"], float) else row["filled_by"])
            if row["missing"]
            else "",
        )
        for row in column_rows(data, encoding)
    ]
    rows_in_table = len(data.frame)
    columns = ("column", "encoding", "missing", "filled by")
    info_table(table(f"{data.path.name}: {rows_in_table:,} rows", columns, rows, right=(2,)))
    data = replace(data, missing=encoding.missing)
    for column in encoding.columns:
        # The user's own name for missing values, of `--impute COLUMN=value=none`, needs no remark.
        of_rule = column.fill not in data.values(column.name).texts()
        categories = [text for text in column.categories or () if not (of_rule and text == column.fill)]
        _tell_of_likely_missing(column.name, categories)
    _tell_of_likely_missing(", ".join(encoding.targets), encoding.classes or ())
    if labels is not None and encoding.classes is not None:
        counts = np.bincount(labels.ravel(), minlength=len(encoding.classes))
        shares = (
            f"{name} {count:,} ({share(int(count), labels.size)})"
            for name, count in zip(encoding.classes, counts, strict=True)
        )
        info(f"Classes of '{encoding.targets[0]}', in the order of the model's outputs: {', '.join(shares)}")


def _tell_of_likely_missing(name: str, categories: Sequence[str]) -> None:
    texts = likely_missing(list(categories))
    if texts:
        listed = ", ".join(repr(text) for text in texts)
        options = " ".join(f"--missing {shlex.quote(text)}" for text in texts)
        verb, stands = ("are categories", "they stand") if len(texts) > 1 else ("is a category", "it stands")
        info(f"Column '{name}': {listed} {verb}. If {stands} for a missing value, pass {options}.")
