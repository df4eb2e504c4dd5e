"""Encodes one column of a table as numbers, as learned from the table that is trained on."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnxtrain.cli._options import TableOptions
from onnxtrain.errors import InputError
from onnxtrain.selection import some_names
from onnxtrain.tables._impute import FillRule
from onnxtrain.tables._table import Table, Values, one_spelling, places_of

NUMBER, ONE_HOT, ORDINAL = "number", "one-hot", "ordinal"

# Texts, in lower case, that often stand for a missing value. The command only mentions them: "NA" may be a country.
_LIKELY_MISSING = {
    "na",
    "n/a",
    "nan",
    "none",
    "null",
    "nil",
    "missing",
    "unknown",
    "?",
    "-",
    "#n/a",
    "<na>",
    ".",
}


def likely_missing(texts: list[str]) -> list[str]:
    """Finds texts that often stand for a missing value.

    >>> likely_missing(["NA", "S", "null"])
    ['NA', 'null']
    """
    return [text for text in texts if text.strip().lower() in _LIKELY_MISSING]


@dataclass(frozen=True)
class Column:
    """Encoding of one column.

    Attributes:
        name: name of the column.
        kind: "number", "one-hot" or "ordinal".
        categories: categories in the order of their numbers, e.g. ["female", "male"]; None for numbers.
        fill: value that replaces a missing one, e.g. 29.5 or "male"; None if missing values are an error.
        mean, deviation: for numbers; x becomes (x - mean) / deviation.
        unknown: treatment of categories that training has not seen: "error", "ignore" (zeros) or "own" (a category).
    """

    name: str
    kind: str
    categories: list[str] | None = None
    fill: float | str | None = None
    mean: float = 0.0
    deviation: float = 1.0
    unknown: str = "error"

    @classmethod
    def learn(
        cls,
        table: Table,
        name: str,
        options: TableOptions,
        *,
        categorical: bool,
        fill: FillRule | None = None,
        rows: np.ndarray[Any, Any] | None = None,
    ) -> Column:
        """Learns the encoding of a column.

        Args:
            table: table to train on, with the rows that are split off for validation.
            name: name of the column.
            options: encoding of texts, and scaling.
            categorical: True for categories that may look like numbers.
            fill: rule that fills missing values; None if they are an error.
            rows: indices of the rows that means, medians and frequencies are learned from; None for all.

        Raises:
            InputError: the options do not encode the column, or the rows to learn from have no values.
        """
        values = table.values(name)
        learned = np.zeros(len(values.missing), bool)
        learned[slice(None) if rows is None else rows] = True
        if (values.missing | ~learned).all():
            where = "" if rows is None else " in the rows that are trained on"
            raise InputError(
                f"The table '{table.path}': column '{name}' has no values{where}. Leave it out: --inputs."
            )
        if is_numeric(table, name, values, categorical=categorical):
            return cls._learn_numbers(table, name, options, fill, learned)
        texts = values.texts()
        if not (options.one_hot or options.ordinal):
            row = int((~values.missing & (~values.is_number | categorical)).argmax())
            comma = " (numbers are written with a decimal point: 1.5)" if _has_comma(values.raw[row]) else ""
            raise InputError(
                f"{table.at(name, row)}: {values.raw[row]!r} is no number{comma}. Encode columns of texts by --one-hot "
                "or --ordinal, or name the columns to take: --inputs."
            )
        present = [text for text, counts in zip(texts, learned, strict=True) if counts and text is not None]
        fill_text = None if fill is None else fill.category(name, present)
        # A value of --impute may be spelled as another file spells it.
        if fill_text is not None and values.has_only_numbers:
            fill_text = one_spelling(fill_text)
        # Those of all rows: the number of inputs must not depend on the choice of the rows for validation. Sorted: nor
        # may the numbers of the categories depend on the order of the rows.
        filled = {fill_text if text is None else text for text in texts}
        categories = sorted(text for text in filled if text is not None)
        kind = ONE_HOT if options.one_hot else ORDINAL
        return cls(
            name, kind, [str(text) for text in categories], fill_text, unknown=options.unknown_category
        )

    @classmethod
    def _learn_numbers(
        cls,
        table: Table,
        name: str,
        options: TableOptions,
        fill: FillRule | None,
        learned: np.ndarray[Any, Any],
    ) -> Column:
        """Learns the encoding of numbers; `learned` is True for the rows that statistics are learned from."""
        values = table.values(name)
        _require_finite(table, name, values)
        # Mean and deviation are those of the filled column, as after scikit-learn's SimpleImputer.
        numbers = values.numbers[learned & ~values.missing]
        number = None if fill is None else fill.number(name, numbers)
        if number is not None:
            numbers = np.where(values.missing, number, values.numbers)[learned]
        column = cls(name, NUMBER, fill=number)
        if options.scale:
            # A constant column has deviation 0, and dividing by it gives NaN; scikit-learn divides by 1, too.
            column = replace(column, mean=float(numbers.mean()), deviation=float(numbers.std()) or 1.0)
        return column

    @property
    def width(self) -> int:
        """Number of inputs that the column becomes: for a one-hot column its categories, one more for unknown ones."""
        return len(self.categories or ()) + (self.unknown == "own") if self.kind == ONE_HOT else 1

    @property
    def codes(self) -> np.ndarray[Any, Any]:
        """Encoding of each category, float64 [categories, width]; the last row may be that of unknown ones."""
        count = len(self.categories or ())
        rows = count + (self.unknown != "error")
        if self.kind == ORDINAL:
            return np.arange(rows, dtype=np.float64)[:, None]
        return np.eye(rows, self.width)

    def numbers(self, table: Table) -> np.ndarray[Any, Any]:
        """Encodes the column, float64 [rows, width]. Raises InputError: a value is missing, infinite or unknown."""
        values = table.values(self.name)
        if values.missing.any() and self.fill is None:
            raise InputError(
                f"{table.at(self.name, int(values.missing.argmax()))}: the value is missing. Fill such values by "
                "--impute when training, e.g. --impute median, or remove the rows."
            )
        if self.kind == NUMBER:
            # A column of numbers in training may hold texts in another file.
            wrong = ~values.missing & ~values.is_number
            if wrong.any():
                row = int(wrong.argmax())
                raise InputError(
                    f"{table.at(self.name, row)}: {values.raw[row]!r} is no number.{_missing_hint(values.raw[row])}"
                )
            _require_finite(table, self.name, values)
            numbers = np.where(values.missing, self.fill if self.fill is not None else 0.0, values.numbers)
            return np.asarray((numbers - self.mean) / self.deviation)[:, None]
        assert self.categories is not None
        places, others = places_of(self.categories), len(self.categories)
        # A missing value counts as the category that fills gaps.
        texts = [self.fill if text is None else text for text in values.texts()]
        unknown = next((row for row, text in enumerate(texts) if text not in places), None)
        # Guessing a category would be silent.
        if unknown is not None and self.unknown == "error":
            raise InputError(
                f"{table.at(self.name, unknown)}: {texts[unknown]!r} is none of the categories of training: "
                f"{some_names(self.categories)}. Training with --unknown-category ignore or own admits others."
            )
        return np.asarray(self.codes[[places.get(str(text), others) for text in texts]])


def is_numeric(table: Table, name: str, values: Values, *, categorical: bool) -> bool:
    """Checks if a column holds numbers and no categories. Raises InputError: a .csv column holds both."""
    present = ~values.missing
    # A .parquet file declares its types; of a .csv file only the values tell.
    if categorical or values.text_type or not values.is_number.any():
        return False
    wrong = present & ~values.is_number
    if not wrong.any():
        return True
    # The first text and the first number: one of the two is usually a typing error or a missing value.
    row, other = int(wrong.argmax()), int(values.is_number.argmax())
    raise InputError(
        f"{table.at(name, row)}: {values.raw[row]!r} is no number, while row {other + 1} has {values.raw[other]!r}."
        f"{_missing_hint(values.raw[row])} If the column holds categories, pass --categorical {_quoted(name)}."
    )


def _has_comma(value: object) -> bool:
    """True for a number with a decimal comma, e.g. "1,5"."""
    return re.fullmatch(r"[+-]?\d+,\d+", str(value).strip()) is not None


def _missing_hint(value: object) -> str:
    return f" If it stands for a missing value, pass --missing {_quoted(str(value))} when training."


def _quoted(text: str) -> str:
    return text if text.replace("_", "").isalnum() else f"'{text}'"


def _require_finite(table: Table, name: str, values: Values) -> None:
    infinite = np.isinf(values.numbers)
    if infinite.any():
        row = int(infinite.argmax())
        raise InputError(
            f"{table.at(name, row)}: {values.raw[row]} is infinite ({int(infinite.sum())} such values). Remove such "
            "rows, or write the largest number that makes sense."
        )
