"""Encodes a column of a table as numbers, with one class for each kind of column.

A `Column` is fitted to one table, encodes the same column of other tables, and writes the encoding as ONNX nodes.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
import onnx_ir as ir

from onnxtrain._words import argument
from onnxtrain.errors import InputError
from onnxtrain.selection import some_names
from onnxtrain.tables._impute import FillRule
from onnxtrain.tables._spelling import canonical_spelling, category_numbers, spells_number
from onnxtrain.tables._table import Array, Values
from onnxtrain.tables._writer import ColumnWriter

Encode = Literal["one-hot", "ordinal"]
"""Encoding of categories: one 0/1 input per category, or a single input with the category's index."""

Unknown = Literal["error", "ignore", "own"]
"""Treatment of categories that are not in the training data: an error, zeros, or one extra category for all of them."""


@dataclass(frozen=True, kw_only=True)
class Column(ABC):
    """Encoding of a column, fitted to a table.

    Attributes:
        name: name of the column.
        fill: value that replaces missing values, e.g. 29.5 or "male"; None if a missing value is an error.
    """

    dtype: ClassVar[ir.DataType]
    """Element type of the column as an input of an ONNX model."""

    name: str
    fill: Any = None

    @property
    @abstractmethod
    def width(self) -> int:
        """Number of encoded columns."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Human-readable description, e.g. "3 categories, one-hot"."""

    @abstractmethod
    def encode(self, values: Values) -> Array:
        """Returns the encoded column, float64 [rows, width].

        Raises:
            InputError: a value cannot be encoded; the message names its row.
        """

    @abstractmethod
    def raw(self, values: Values) -> Array:
        """Returns the unencoded column [rows], as an input for a model that contains the nodes from :meth:`write`."""

    @abstractmethod
    def write(self, writer: ColumnWriter, x: ir.Value) -> ir.Value:
        """Writes the nodes that encode the column.

        Args:
            writer: writer for the model's graph.
            x: the unencoded column, [rows] of type :attr:`dtype`.

        Returns:
            The encoded column, double [rows, width].
        """

    def to_dict(self) -> dict[str, Any]:
        """Converts the column to a dict of JSON values; :func:`column_from_dict` is the inverse."""
        return {"type": type(self).__name__, **asdict(self)}

    def _require_filled(self, values: Values) -> None:
        if values.missing.any() and self.fill is None:
            raise InputError(
                f"{values.at(int(values.missing.argmax()))}: the value is missing. Fill such values by "
                f"{argument('impute', 'median')} or another rule when training, or remove the rows."
            )


@dataclass(frozen=True, kw_only=True)
class NumberColumn(Column):
    """A column of numbers, encoded as (x - mean) / deviation.

    Attributes:
        mean: mean of the training rows; 0 without scaling.
        deviation: standard deviation of the training rows; 1 without scaling and for a constant column.
    """

    dtype = ir.DataType.DOUBLE
    mean: float = 0.0
    deviation: float = 1.0

    @classmethod
    def fit(cls, values: Values, rows: Array, rule: FillRule | None, *, scale: bool) -> Self:
        """Fits the encoding to a column.

        Args:
            values: the column's values in all rows of the table.
            rows: bool [rows]; True for the rows from which statistics are computed.
            rule: rule that fills missing values; None if missing values are an error.
            scale: True to scale to mean 0 and standard deviation 1.

        Raises:
            InputError: a value is infinite, or the rule cannot be applied to numbers.
        """
        _require_finite(values)
        numbers = values.numbers[rows & ~values.missing]
        fill = None if rule is None else rule.number(values.name, numbers)
        if fill is not None:
            # Like SimpleImputer followed by StandardScaler: mean and deviation include the filled values.
            numbers = np.where(values.missing, fill, values.numbers)[rows]
        if not scale:
            return cls(name=values.name, fill=fill)
        # Like StandardScaler: a constant column is divided by 1.
        deviation = float(numbers.std()) or 1.0
        return cls(name=values.name, fill=fill, mean=float(numbers.mean()), deviation=deviation)

    @property
    def width(self) -> int:
        """Number of encoded columns: 1."""
        return 1

    @property
    def description(self) -> str:
        """Human-readable description, e.g. "number"; with mean and standard deviation if the column is scaled."""
        if (self.mean, self.deviation) == (0.0, 1.0):
            return "number"
        return f"number, standardized: mean {self.mean:.5g}, deviation {self.deviation:.5g}"

    def encode(self, values: Values) -> Array:
        """Returns the encoded column, float64 [rows, 1].

        Raises:
            InputError: a value is a string or infinite, or is missing and :attr:`fill` is None.
        """
        self._require_filled(values)
        # The column may contain strings in another table.
        wrong = ~values.missing & ~values.is_number
        if wrong.any():
            row = int(wrong.argmax())
            raise InputError(
                f"{values.at(row)}: {values.raw[row]!r} is not a number.{_missing_hint(values.raw[row])}"
            )
        _require_finite(values)
        numbers = np.where(values.missing, self.fill if self.fill is not None else 0.0, values.numbers)
        return np.asarray((numbers - self.mean) / self.deviation)[:, None]

    def raw(self, values: Values) -> Array:
        """Returns the numbers, float64 [rows]; NaN for a missing value."""
        return np.where(values.missing, np.nan, values.numbers)

    def write(self, writer: ColumnWriter, x: ir.Value) -> ir.Value:
        """Writes nodes that fill missing values and scale the column.

        Running the model fails for an infinite value, and for a missing value if :attr:`fill` is None.
        """
        op = writer.op
        refused: ir.Value = op.IsInf(x)
        filled, fault = x, "infinite"
        if self.fill is not None:
            filled = op.Where(op.IsNaN(x), op.const(float(self.fill), like=x), x)
        else:
            refused, fault = op.Or(refused, op.IsNaN(x)), "missing or infinite"
        filled = op.Add(filled, writer.fail_if(refused, f"column '{self.name}': a value is {fault}"))
        return op.Unsqueeze(op.Div(op.Sub(filled, self.mean), self.deviation), [1])


@dataclass(frozen=True, kw_only=True)
class CategoryColumn(Column):
    """A column of categories; each value is encoded as a row of :attr:`codes`.

    Attributes:
        categories: the categories, indexed by category number, e.g. ["female", "male"].
        how: "one-hot" or "ordinal".
        unknown: treatment of unknown categories: "error", "ignore" (zeros) or "own" (one extra category for all).
    """

    dtype = ir.DataType.STRING
    categories: list[str]
    how: Encode
    unknown: Unknown = "error"

    @classmethod
    def fit(
        cls, values: Values, rows: Array, rule: FillRule | None, *, how: Encode, unknown: Unknown
    ) -> Self:
        """Fits the encoding to a column.

        Args:
            values: the column's values in all rows of the table.
            rows: bool [rows]; True for the rows from which the rule computes the most frequent category.
            rule: rule that fills missing values; None if missing values are an error.
            how: "one-hot" or "ordinal".
            unknown: treatment of unknown categories.

        Raises:
            InputError: the rule cannot be applied to categories.
        """
        texts = values.texts()
        counted = [text for text, counts in zip(texts, rows, strict=True) if counts and text is not None]
        fill = None if rule is None else rule.category(values.name, counted)
        # The rule may write a number differently from the file, e.g. "2.0" instead of "2".
        if fill is not None and values.has_only_numbers:
            fill = canonical_spelling(fill)
        # The categories of all rows, sorted: width and numbers must not depend on the choice of validation rows or on
        # the order of the rows.
        found = {fill if text is None else text for text in texts}
        categories = sorted(text for text in found if text is not None)
        return cls(name=values.name, fill=fill, categories=categories, how=how, unknown=unknown)

    @property
    def width(self) -> int:
        """Number of encoded columns: 1 if ordinal; if one-hot, one per category, and one more if `unknown` is "own"."""
        return 1 if self.how == "ordinal" else len(self.categories) + (self.unknown == "own")

    @property
    def description(self) -> str:
        """Human-readable description, e.g. "3 categories, one-hot"."""
        how = "one-hot" if self.how == "one-hot" else "as numbers 0, 1, ..."
        others = {"error": "", "ignore": ", others as zeros", "own": ", one more for others"}[self.unknown]
        return f"{len(self.categories)} categories, {how}{others}"

    @property
    def codes(self) -> Array:
        """Codes of the categories, float64 [n, width].

        The last row is the code of unknown categories, unless :attr:`unknown` is "error".
        """
        rows = len(self.categories) + (self.unknown != "error")
        return (
            np.arange(rows, dtype=np.float64)[:, None] if self.how == "ordinal" else np.eye(rows, self.width)
        )

    def encode(self, values: Values) -> Array:
        """Returns the encoded column, float64 [rows, width].

        Raises:
            InputError: a category is unknown and :attr:`unknown` is "error", or a value is missing and :attr:`fill` is
                None.
        """
        self._require_filled(values)
        numbers = category_numbers(self.categories)
        texts = [self.fill if text is None else text for text in values.texts()]
        unknown = next((row for row, text in enumerate(texts) if text not in numbers), None)
        if unknown is not None and self.unknown == "error":
            raise InputError(
                f"{values.at(unknown)}: {texts[unknown]!r} is not a category of the training data: "
                f"{some_names(self.categories)}. Train with {argument('unknown_category', 'ignore')} or "
                f"{argument('unknown_category', 'own')} to accept other categories."
            )
        return np.asarray(self.codes[[numbers.get(str(text), len(self.categories)) for text in texts]])

    def raw(self, values: Values) -> Array:
        """Returns the categories as an array of strings [rows], with "" for missing values."""
        return np.array([text or "" for text in values.texts()], object)

    def write(self, writer: ColumnWriter, x: ir.Value) -> ir.Value:
        """Writes nodes that replace each category with its row of :attr:`codes`.

        Running the model fails for an unknown category if :attr:`unknown` is "error", and for a missing value if
        :attr:`fill` is None.
        """
        numbers = category_numbers(self.categories)
        # If `missing` lists a number, it matches in every spelling; a Boolean or a string only matches exactly.
        exact = ["", *writer.missing]
        missing = [text for text in category_numbers(exact) if text in exact or spells_number(text)]
        # Out of range, so that the run fails. The fill value may itself be an unknown category.
        number_of_missing = len(self.codes)
        if self.fill is not None:
            number_of_missing = numbers.get(str(self.fill), len(self.categories))
        numbers |= dict.fromkeys(missing, number_of_missing)
        faults = ["none of the categories of training"] if self.unknown == "error" else []
        faults += [] if self.fill is not None else ["missing"]
        message = f"column '{self.name}': a value is {', or '.join(faults) or 'wrong'}"
        index = writer.look_up(x, numbers, default=len(self.categories))
        return writer.pick_rows(self.codes, index, message)


COLUMN_TYPES = {kind.__name__: kind for kind in (NumberColumn, CategoryColumn)}
"""Column classes by class name."""


def column_from_dict(content: dict[str, Any]) -> Column:
    """Restores a column from the result of :meth:`Column.to_dict`. Raises KeyError or TypeError if it is damaged."""
    content = dict(content)
    return COLUMN_TYPES[content.pop("type")](**content)


def holds_numbers(values: Values, *, categorical: bool) -> bool:
    """True if a column contains numbers and is not declared categorical.

    Raises:
        InputError: a column of a .csv file contains both numbers and strings.
    """
    # A typed file declares the column's type; in a .csv file, only the values show it.
    if categorical or values.text_type or not values.is_number.any():
        return False
    wrong = ~values.missing & ~values.is_number
    if not wrong.any():
        return True
    # One of the two rows usually contains a typo or a marker for missing values.
    row, other = int(wrong.argmax()), int(values.is_number.argmax())
    raise InputError(
        f"{values.at(row)}: {values.raw[row]!r} is not a number, but row {other + 1} has "
        f"{values.raw[other]!r}.{_missing_hint(values.raw[row])} If the column holds categories, pass "
        f"{argument('categorical', values.name)}."
    )


def no_encoding(values: Values, *, categorical: bool) -> InputError:
    """Returns the error to raise for a column of categories if `encode` is not set; it quotes the first category.

    Args:
        values: values of the column.
        categorical: True if the column is declared categorical, so that its numbers are categories as well.
    """
    row = int((~values.missing & (~values.is_number | categorical)).argmax())
    value = str(values.raw[row]).strip()
    if _holds_sentences(values):
        start = value if len(value) <= 60 else f"{value[:57]}..."
        return InputError(
            f"{values.at(row)}: {start!r} is text, not a number or a category. If the model reads texts, "
            "tokenize them with its tokenizer, and save the arrays in an .npz file, e.g. numpy.savez(path, "
            "input_ids=..., attention_mask=..., y=...): docs/guides/fine-tune-a-hugging-face-model.md. Otherwise, "
            f"leave the column out: {argument('inputs')}."
        )
    comma = re.fullmatch(r"[+-]?\d+,\d+", value) is not None
    hint = f" (for a decimal comma, pass {argument('decimal', ',')})" if comma else ""
    return InputError(
        f"{values.at(row)}: {values.raw[row]!r} is not a number{hint}. Encode columns of texts by "
        f"{argument('encode', 'one-hot')} or {argument('encode', 'ordinal')}, or name the columns to take: "
        f"{argument('inputs')}."
    )


def _holds_sentences(values: Values) -> bool:
    """True if most values of a column have three words or more and are different, so that they are no categories."""
    texts = [text for text in values.texts() if text is not None]
    long = sum(len(text.split()) >= 3 for text in texts)
    return len(texts) > 2 and 2 * long > len(texts) and 2 * len(set(texts)) > len(texts)


def _missing_hint(value: object) -> str:
    return (
        f" If it stands for a missing value, pass {argument('missing', str(value))} when training, and "
        f"{argument('impute', 'median')} to fill missing values."
    )


def _require_finite(values: Values) -> None:
    infinite = np.isinf(values.numbers)
    if infinite.any():
        row = int(infinite.argmax())
        raise InputError(
            f"{values.at(row)}: {values.raw[row]} is infinite ({int(infinite.sum())} such values). Remove "
            "such rows, or replace the values with the largest plausible number."
        )
