"""Parses `--impute`, and learns from training data the value that fills the gaps of a column."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from onnxtrain.errors import InputError
from onnxtrain.tables._table import Table

ALL = ""
"""Key of the rule for all columns that have none of their own: no column has this name."""

_STATISTICS = ("mean", "median", "most_frequent")


class FillRule(NamedTuple):
    """Rule that fills missing values of a column.

    Attributes:
        text: value of the option, e.g. "age=median", for messages.
        strategy: "mean", "median", "most_frequent" or "value".
        value: the value as the user wrote it, for the strategy "value".
        of_column: True if the rule names its column.
    """

    text: str
    strategy: str
    value: str = ""
    of_column: bool = False

    def number(self, name: str, numbers: np.ndarray[Any, Any]) -> float:
        """Computes the number that fills gaps, as scikit-learn's SimpleImputer does.

        Args:
            name: name of the column, for the message.
            numbers: values of the rows to train on, without the missing ones.

        Raises:
            InputError: the value of the rule is no finite number.
        """
        if self.strategy == "most_frequent":
            values, counts = np.unique(numbers, return_counts=True)
            # Of equally frequent numbers the smallest: argmax takes the first, and `unique` sorts.
            return float(values[counts.argmax()])
        if self.strategy != "value":
            return float(getattr(np, self.strategy)(numbers))
        try:
            number = float(self.value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise InputError(
                f"--impute {self.text}: the column '{name}' holds numbers, and '{self.value}' is none. Give the column "
                f"a rule of its own, such as --impute {name}=median."
            )
        return number

    def category(self, name: str, texts: Sequence[str]) -> str:
        """Chooses the category that fills gaps.

        Raises:
            InputError: the rule names this column and asks for a mean or a median.
        """
        if self.strategy == "value":
            return self.value
        # A rule for all columns may say "mean" and means the numbers: categories get their most frequent one.
        if self.of_column and self.strategy != "most_frequent":
            raise InputError(
                f"--impute {self.text}: the column '{name}' holds categories, which have no {self.strategy}. Choose "
                f"{name}=most_frequent or {name}=value=VALUE."
            )
        counts = Counter(texts)
        # Of equally frequent categories the alphabetically first one, as in scikit-learn.
        return max(sorted(counts), key=counts.__getitem__)


def parse_impute(texts: Sequence[str] | None, table: Table) -> Mapping[str, FillRule]:
    """Parses the values of `--impute`; returns rules by the name of a column, or :data:`ALL`.

    Raises:
        InputError: a text is no rule, names no column of the table, or two rules are for one column.
    """
    rules: dict[str, FillRule] = {}
    for text in texts or ():
        name, rule = _parse(text, table)
        # The order of the options is to mean nothing: a second rule is an error, not a correction.
        if name in rules:
            where = f"the column '{name}'" if name else "all columns"
            raise InputError(f"--impute gives two rules for {where}: {rules[name].text} and {text}.")
        rules[name] = rule
    return rules


def _parse(text: str, table: Table) -> tuple[str, FillRule]:
    # A column first: one may be called "value", and its name may contain "=".
    for name in sorted(table.columns, key=len, reverse=True):
        if text.startswith(f"{name}=") and (rule := _rule(text, text[len(name) + 1 :])) is not None:
            return name, rule._replace(of_column=True)
    if (rule := _rule(text, text)) is not None:
        return ALL, rule
    name, equals, rest = text.partition("=")
    if equals and _rule(text, rest) is not None:
        # Raises the error that lists the columns.
        table.column(name)
    raise InputError(
        f"--impute is '{text}'; give mean, median, most_frequent or value=VALUE for all columns, or COLUMN= and one of "
        "these for one, e.g. age=median."
    )


def _rule(text: str, rule: str) -> FillRule | None:
    if rule in _STATISTICS:
        return FillRule(text, rule)
    return FillRule(text, "value", rule.removeprefix("value=")) if rule.startswith("value=") else None
