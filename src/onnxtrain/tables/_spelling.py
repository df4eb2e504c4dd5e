"""Normalizes how different programs spell numbers and Booleans: 2.0, "2.0" and "2" all become "2"."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

BOOLEANS = {"true": 1.0, "false": 0.0}
"""Numeric values of Booleans by lower-case spelling: pandas writes True, R writes TRUE."""

# Without leading zeros: "01234" is a code, not another spelling of 1234.
_NUMBER = re.compile(r"[+-]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


def as_text(value: object) -> str:
    """Converts a value to a string; whole floats are written without a decimal point.

    >>> as_text(2.0), as_text("2.0")
    ('2', '2.0')
    """
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value)


def spells_number(text: str) -> bool:
    """True if a string is a number, e.g. "-1.5" or "1e-7"; leading zeros, "nan" and "inf" are not accepted.

    >>> [spells_number(text) for text in ("-1.5", " 2 ", "01234", "nan", "1,5")]
    [True, True, False, False, False]
    """
    return _NUMBER.fullmatch(text.strip()) is not None


def canonical_spelling(value: object) -> str:
    """Returns the canonical spelling of a number or Boolean; other strings are returned unchanged.

    >>> [canonical_spelling(v) for v in ("2.0", 2.0, 2, "+2", "2.50", "1e-7", "TRUE", True, "01234", " a")]
    ['2', '2', '2', '2', '2.5', '1e-07', 'True', 'True', '01234', ' a']
    """
    text = as_text(value)
    if text.lower() in BOOLEANS:
        return text.capitalize()
    if not spells_number(text):
        return text
    number = text.strip()
    # A float has 53 bits, and identifiers may have more digits: integers are not converted.
    if number.lstrip("+-").isdigit():
        return "0" if number.lstrip("+-") == "0" else number.lstrip("+")
    return as_text(float(number)) if math.isfinite(float(number)) else text


def category_numbers(categories: Sequence[str]) -> dict[str, int]:
    """Maps each category, and its equivalent spellings, to the category's index.

    Whole numbers may be written with ".0". If all categories are Booleans, they may be written "true", "True" or
    "TRUE". If a spelling could mean several categories, it maps to the one that is written exactly that way.

    >>> category_numbers(["1", "2.5"])
    {'1.0': 0, '1': 0, '2.5': 1}
    >>> category_numbers(["1", "1.0"])
    {'1': 0, '1.0': 1}
    """
    booleans = all(category.lower() in BOOLEANS for category in categories)
    numbers: dict[str, int] = {}
    for index, category in enumerate(categories):
        spelling = canonical_spelling(category)
        spellings = [spelling]
        if booleans:
            spellings += [category.lower(), category.upper()]
        elif spelling.lstrip("-").isdigit():
            spellings.append(f"{spelling}.0")
        for each in spellings:
            numbers.setdefault(each, index)
    exact = {category: index for index, category in enumerate(categories)}
    return {spelling: index for spelling, index in numbers.items() if spelling not in exact} | exact
