"""Computes the value that fills the missing values of a column."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from onnxtrain._words import argument
from onnxtrain.errors import InputError

OTHERS = "*"
"""Key of the rule for all columns that are not listed by name."""

_STATISTICS = ("mean", "median", "most_frequent")
_VALUE = "value="

Impute: TypeAlias = str | Mapping[str, str] | None
"""A rule for all columns, rules by column, or None if missing values are an error."""


class FillRule(NamedTuple):
    """Rule that fills the missing values of a column.

    Attributes:
        text: "mean", "median", "most_frequent" or "value=VALUE".
        column: name of the column if the rule was given for it alone; None for a rule for all columns.
    """

    text: str
    column: str | None = None

    @property
    def value(self) -> str | None:
        """The VALUE of the rule "value=VALUE"; None for the other rules."""
        return self.text.removeprefix(_VALUE) if self.text.startswith(_VALUE) else None

    def number(self, name: str, numbers: np.ndarray[Any, Any]) -> float:
        """Returns the number that replaces missing values, computed as in scikit-learn's `SimpleImputer`.

        Args:
            name: name of the column, for error messages.
            numbers: float64 [n]; non-missing values of the training rows.

        Raises:
            InputError: the value of the rule is not a finite number.
        """
        if self.text == "most_frequent":
            values, counts = np.unique(numbers, return_counts=True)
            # On a tie the smallest number wins: `unique` sorts, and argmax returns the first.
            return float(values[counts.argmax()])
        if self.value is None:
            return float(getattr(np, self.text)(numbers))
        try:
            number = float(self.value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise InputError(
                f"{self._argument()}: the column '{name}' contains numbers, but '{self.value}' is not a "
                f"number. Give the column its own rule, such as {argument('impute', {name: 'median'})}."
            )
        return number

    def category(self, name: str, texts: Sequence[str]) -> str:
        """Returns the category that replaces missing values.

        For a rule "mean" or "median" that is meant for all columns, this is the most frequent category.

        Args:
            name: name of the column, for error messages.
            texts: non-missing categories of the training rows, one per row.

        Raises:
            InputError: the rule is "mean" or "median", and was given for this column alone.
        """
        if self.value is not None:
            return self.value
        # In a rule for all columns, "mean" is meant for the numbers; categories get the most frequent one.
        if self.column is not None and self.text != "most_frequent":
            raise InputError(
                f"{self._argument()}: the column '{name}' contains categories, which have no {self.text}. "
                f"Choose {argument('impute', {name: 'most_frequent'})} or "
                f"{argument('impute', {name: 'value=VALUE'})}."
            )
        counts = Counter(texts)
        # On a tie the alphabetically first category wins, as in scikit-learn.
        return max(sorted(counts), key=counts.__getitem__)

    def _argument(self) -> str:
        return argument("impute", self.text if self.column is None else {self.column: self.text})


def is_fill_rule(text: str) -> bool:
    """True if `text` is "mean", "median" or "most_frequent", or begins with "value="."""
    return text in _STATISTICS or text.startswith(_VALUE)


def fill_rule(impute: Impute, column: str) -> FillRule | None:
    """Returns the rule for one column; None if missing values in this column are an error.

    >>> fill_rule({"age": "mean", "*": "median"}, "fare")
    FillRule(text='median', column=None)
    """
    rules = {OTHERS: impute} if isinstance(impute, str) else impute or {}
    if column in rules:
        return FillRule(rules[column], column)
    return FillRule(rules[OTHERS]) if OTHERS in rules else None


def check_impute(impute: Impute) -> None:
    """Raises InputError if a rule in `impute` is invalid."""
    for text in [impute] if isinstance(impute, str) else (impute or {}).values():
        if not is_fill_rule(text):
            raise InputError(
                f"{argument('impute')} is {text!r}; pass mean, median, most_frequent or value=VALUE for "
                "all columns, or one of them for a single column, e.g. "
                f"{argument('impute', {'age': 'median'})}."
            )
