"""Prints how a table is encoded: the encoding and missing values of each column, and the share of each class."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from onnxtrain.cli._output import info, info_table, table
from onnxtrain.runtime.dtypes import Array
from onnxtrain.tables import CategoryColumn, Table, TableEncoder

# Strings, in lower case, that often mean a missing value. They only cause a note, because "NA" may be a country.
_LIKELY_MISSING = {
    *("na", "n/a", "nan", "none", "null", "nil", "missing", "unknown", "?", "-", "#n/a", "<na>", "."),
}


def likely_missing(texts: Sequence[str]) -> list[str]:
    """Returns the strings in `texts` that often stand for a missing value.

    >>> likely_missing(["NA", "S", "null"])
    ['NA', 'null']
    """
    return [text for text in texts if text.strip().lower() in _LIKELY_MISSING]


def share(count: int, total: int) -> str:
    """Formats `count / total` as a percentage.

    >>> share(28, 400)
    '7.0 %'
    """
    return f"{100 * count / max(total, 1):.1f} %"


def print_table_summary(data: Table, encoder: TableEncoder, labels: Array | None) -> None:
    """Prints to standard error how a table is encoded, and how many samples each class has.

    Args:
        data: the training data.
        encoder: encoder fitted to the table.
        labels: class index of each row; None if the target has no classes.
    """
    missing = encoder.missing_counts(data)
    rows = []
    for column in encoder.columns_:
        filled = f"{column.fill:.5g}" if isinstance(column.fill, float) else column.fill
        count = missing[column.name]
        rows.append((column.name, column.description, f"{count:,}", filled if count else ""))
    titles = ("column", "encoding", "missing", "filled by")
    how = "" if data.dialect is None else data.dialect.description
    title = ", ".join(filter(None, (f"{Path(data.source).name}: {len(data):,} rows", how)))
    info_table(table(title, titles, rows, right=(2,)))
    if encoder.target_scale_ is not None:
        scale = encoder.target_scale_
        for name, mean, deviation in zip(encoder.target, scale.mean, scale.deviation, strict=True):
            info(f"Target '{name}', standardized in training: mean {mean:.5g}, deviation {deviation:.5g}")
    for column in encoder.columns_:
        if isinstance(column, CategoryColumn):
            # A category that the user chose for missing values, as in `--impute COLUMN=value=none`, needs no note.
            occurs = column.fill in data.values(column.name, encoder.missing).texts()
            _warn_of_likely_missing(column.name, [t for t in column.categories if occurs or t != column.fill])
    _warn_of_likely_missing(", ".join(encoder.target), encoder.classes_ or ())
    if labels is not None and encoder.classes_ is not None:
        counts = np.bincount(labels.ravel(), minlength=len(encoder.classes_))
        shares = (
            f"{name} {count:,} ({share(int(count), labels.size)})"
            for name, count in zip(encoder.classes_, counts, strict=True)
        )
        info(f"Classes of '{encoder.target[0]}', in the order of the model's outputs: {', '.join(shares)}")


def _warn_of_likely_missing(name: str, categories: Sequence[str]) -> None:
    texts = likely_missing(categories)
    if texts:
        listed = ", ".join(repr(text) for text in texts)
        options = " ".join(f"--missing {shlex.quote(text)}" for text in texts)
        verb, stands = ("are categories", "they stand") if len(texts) > 1 else ("is a category", "it stands")
        info(f"Column '{name}': {listed} {verb}. If {stands} for a missing value, pass {options}.")
