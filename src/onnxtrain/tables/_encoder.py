"""Encodes a table as arrays: chooses columns, fills missing values, and turns categories into numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain._words import argument
from onnxtrain.errors import CheckpointError, InputError, OnnxTrainError
from onnxtrain.losses import TargetScale
from onnxtrain.passes import CANONICAL_OPSET, ModelSource, as_given, canonicalize, load_model
from onnxtrain.runtime.calibration import PROPERTY as CALIBRATION
from onnxtrain.runtime.calibration import StoredCalibration
from onnxtrain.runtime.json_text import parse_json
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.selection import some_names
from onnxtrain.tables._columns import (
    CategoryColumn,
    Column,
    Encode,
    NumberColumn,
    Unknown,
    column_from_dict,
    holds_numbers,
    no_encoding,
)
from onnxtrain.tables._dialect import Dialect
from onnxtrain.tables._graph import Activation, attach_classes, attach_columns, output_name
from onnxtrain.tables._impute import OTHERS, Impute, check_impute, fill_rule
from onnxtrain.tables._table import Array, Table, TableLike, Values, as_table

PROPERTY = "onnxtrain.table"
"""Key of the encoder's JSON text, in the properties of a run's checkpoint and the metadata of an exported model."""

_VERSION = 1


@dataclass(kw_only=True)
class TableEncoder:
    """Encodes the columns of a table as arrays for a model, and can prepend the same encoding to the model.

    Like a scikit-learn transformer, the encoder learns from one table (:meth:`fit`) and encodes others in the same way
    (:meth:`transform`). Unlike scikit-learn's transformers, it takes the whole table, including the target, and never
    guesses: a missing value, an unknown category or infinity raises an error that names the row, unless an argument
    specifies how to handle it.

    Args:
        target: columns to predict, e.g. "survived"; empty for tables without a target. Strings become class numbers.
        inputs: columns to feed to the model, in this order; by default all columns that have no other role.
        id: columns that are neither inputs nor targets, such as keys.
        sample_weight: column with the weight of each row; it is not fed to the model.
        missing: strings that stand for a missing value, besides the empty string, e.g. ["NA", "-999"].
        impute: rule that fills missing values, as in scikit-learn's `SimpleImputer`: "mean", "median", "most_frequent"
            or "value=VALUE"; or rules by column, with "*" for all other columns, e.g. {"age": "median",
            "cabin": "value=none"}. In a rule for all columns or "*", "mean" and "median" mean "most_frequent" for
            columns of categories. None: a missing value is an error.
        categorical: columns to read as categories although they contain numbers, e.g. ["zip"].
        encode: encoding of categories: "one-hot" or "ordinal" (numbers 0, 1, 2, ... in alphabetical order).
            None: a string column is an error.
        unknown_category: treatment of categories that are not in the fitted table: "error"; "ignore" for zeros in a
            one-hot column; "own" for one extra category that covers them all.
        scale: True to scale numbers to mean 0 and standard deviation 1.
        scale_target: True to compute :attr:`target_scale_`, with which a model learns the target standardized. The
            encoded target keeps its units.

    Attributes:
        columns_: encoding of each input column, once fitted.
        classes_: class names of a string target, indexed by class number; None for a numeric target.
        target_scale_: mean and standard deviation of the target in the training rows, to pass as
            `Recipe(target_scale=encoder.target_scale_)`; None without `scale_target`.
        dialect_: dialect of the text file that the encoder was fitted to; other files are read in the same way where
            they leave it open. None if it was not fitted to a text file.

    Raises:
        InputError: the arguments are invalid or cannot be combined.

    Example:
        >>> import pandas
        >>> people = pandas.DataFrame(
        ...     {"age": [20, None, 40], "town": ["Oslo", "Kiel", "Oslo"], "won": ["no", "yes", "no"]}
        ... )
        >>> encoder = TableEncoder(target="won", impute="median", encode="one-hot").fit(people)
        >>> encoder.transform(people)
        array([[20., 0., 1.],
               [30., 1., 0.],
               [40., 0., 1.]])
        >>> encoder.transform_target(people), encoder.classes_
        (array([0, 1, 0]), ['no', 'yes'])
    """

    target: str | Sequence[str] = ()
    inputs: str | Sequence[str] = ()
    id: str | Sequence[str] = ()
    sample_weight: str | None = None
    missing: str | Sequence[str] = ()
    impute: Impute = None
    categorical: str | Sequence[str] = ()
    encode: Encode | None = None
    unknown_category: Unknown = "error"
    scale: bool = False
    scale_target: bool = False
    columns_: list[Column] = field(default_factory=list, init=False, repr=False)
    classes_: list[str] | None = field(default=None, init=False, repr=False)
    target_scale_: TargetScale | None = field(default=None, init=False, repr=False)
    dialect_: Dialect | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("target", "inputs", "id", "missing", "categorical"):
            value = getattr(self, name)
            setattr(self, name, [value] if isinstance(value, str) else list(value))
        if self.unknown_category == "ignore" and self.encode == "ordinal":
            raise InputError(
                f"{argument('unknown_category', 'ignore')} encodes an unknown category as zeros, but with "
                f"{argument('encode', 'ordinal')} 0 is the first category. Choose "
                f"{argument('unknown_category', 'own')}, which uses the number after the last category, or "
                f"{argument('encode', 'one-hot')}."
            )
        check_impute(self.impute)

    def fit(self, table: TableLike, *, rows: Array | None = None) -> Self:
        """Learns the encoding from a table.

        Args:
            table: a :class:`Table`, the path of a .csv, .tsv or .parquet file, a pandas `DataFrame`, or an object with
                `to_pandas`, e.g. a polars `DataFrame` or a pyarrow `Table`.
            rows: indices or mask of the rows from which means, medians, deviations and frequencies are computed; None
                for all. Categories are collected from the whole table, so the number of inputs does not depend on the
                validation split.

        Returns:
            The encoder itself.

        Raises:
            InputError: a column is missing, or contains values that cannot be encoded with these arguments.
        """
        table = as_table(table)
        self.dialect_ = table.dialect
        inputs = self._input_names(table)
        self.classes_ = self.find_classes(table)
        counted = np.zeros(len(table), bool)
        counted[slice(None) if rows is None else rows] = True
        where = "" if rows is None else " in the rows that are trained on"
        self.target_scale_ = self._fit_target(table, counted) if self.scale_target else None
        self.columns_ = [self._fit_column(self._values(table, name), counted, where) for name in inputs]
        return self

    def fit_transform(self, table: TableLike, *, rows: Array | None = None) -> Array:
        """Learns the encoding from a table and returns the encoded table: :meth:`fit`, then :meth:`transform`."""
        table = as_table(table)
        return self.fit(table, rows=rows).transform(table)

    def transform(self, table: TableLike) -> Array:
        """Encodes the input columns and concatenates them.

        Args:
            table: table with the columns of the fitted table.

        Returns:
            The encoded table, float64 [rows, width].

        Raises:
            InputError: a column is missing, or a value cannot be encoded; the message names its row.
        """
        table = as_table(table, self.dialect_)
        return np.concatenate([c.encode(self._values(table, c.name)) for c in self._fitted()], axis=1)

    def transform_target(self, table: TableLike) -> Array:
        """Encodes the target columns.

        Returns:
            Class numbers for a string target, otherwise the values; int64 if all are integers and :attr:`scale_target`
            is False, otherwise float64. The shape is [rows], or [rows, n] for n target columns.

        Raises:
            InputError: a value is missing, or a class is not in :attr:`classes_`.
        """
        table = as_table(table, self.dialect_)
        columns = [self._target_column(table, name, classes=True) for name in self.target]
        array = np.stack(columns, axis=1)
        # Labels are integers; a target to standardize is a quantity.
        is_label = not self.scale_target and (array == np.floor(array)).all()
        array = array.astype(np.int64) if is_label else array
        return array[:, 0] if len(columns) == 1 else array

    def find_classes(self, table: TableLike) -> list[str] | None:
        """Returns the sorted class names if the target is a single column of categories, otherwise None.

        Raises:
            InputError: the column is missing, or contains both numbers and strings.
        """
        table = as_table(table, self.dialect_)
        if len(self.target) != 1:
            return None
        values = self._values(table, self.target[0])
        if holds_numbers(values, categorical=self.target[0] in self.categorical):
            return None
        return sorted({text for text in values.texts() if text is not None})

    def arrays(
        self, table: TableLike, inputs: Sequence[InputSpec], targets: Sequence[InputSpec] = ()
    ) -> dict[str, Array]:
        """Encodes a table as arrays for a model.

        Args:
            table: table with the columns of the fitted table.
            inputs: inputs of the model, e.g. `trainer.manifest.inputs`. If there is one, all encoded columns are
                concatenated; otherwise, columns and inputs are matched by name.
            targets: targets of the model, e.g. `trainer.manifest.targets`; empty for prediction. The first one gets all
                target columns, and the others are ignored.

        Returns:
            The arrays, keyed by input or target name.

        Raises:
            InputError: the columns do not match the model's inputs, or a value cannot be encoded.
        """
        table = as_table(table, self.dialect_)
        blocks = {c.name: c.encode(self._values(table, c.name)) for c in self._fitted()}
        columns = {c.name: [c] for c in self.columns_}
        if len(inputs) == 1:
            blocks = {inputs[0].name: np.concatenate(list(blocks.values()), axis=1)}
            columns = {inputs[0].name: self.columns_}
        arrays = {}
        for spec in inputs:
            if spec.name not in blocks:
                raise self._no_column(
                    spec.name, [item.name for item in inputs], f"the table '{table.source}'"
                )
            _require_width(columns[spec.name], spec.name, spec.shape, f"The table '{table.source}'")
            arrays[spec.name] = _as_input(blocks[spec.name], spec)
        if targets:
            arrays[targets[0].name] = self._target_array(table, targets[0])
        return arrays

    def sample_weights(self, table: TableLike) -> Array | None:
        """Returns the sample weights, float64 [rows]; None if :attr:`sample_weight` is not set.

        Raises:
            InputError: the column or a value is missing, or a value is not a finite number.
        """
        if self.sample_weight is None:
            return None
        values = self._values(as_table(table, self.dialect_), self.sample_weight)
        return NumberColumn(name=self.sample_weight).encode(values)[:, 0]

    def missing_counts(self, table: TableLike) -> dict[str, int]:
        """Returns the number of missing values in each input column, by column name."""
        table = as_table(table, self.dialect_)
        return {c.name: int(self._values(table, c.name).missing.sum()) for c in self._fitted()}

    def attach(
        self, model: ModelSource, *, logits: str | None = None, activation: Activation = None
    ) -> onnx.ModelProto | ir.Model:
        """Prepends the encoding to a model, which then takes the raw columns of a table as inputs.

        The new model has one input per column, of shape [rows]: double for numbers (NaN if missing) and string for
        categories (empty if missing), as returned by :meth:`raw_columns`. It runs on stock ONNX Runtime. The encoder is
        stored in the model's metadata, from which `onnxtrain predict` reads it.

        Args:
            model: trained network, e.g. the path of a file that `Trainer.export` wrote; it is not changed. If it has
                one input, all encoded columns are concatenated; otherwise, columns and inputs are matched by name.
            logits: name of the output with a classifier's logits. Two outputs are appended: `probability`, and `class`
                with the names in :attr:`classes_`; if a column has one of these names, "predicted_" is prepended. None
                appends no outputs.
            activation: function that turns logits into probabilities: "softmax" after a cross-entropy, "sigmoid" after
                a binary cross-entropy, "exp" after a negative log-likelihood. None: `probability` is not appended.

        Returns:
            The new model: an `onnx_ir.Model` if `model` is one, otherwise a `ModelProto`.

        Raises:
            InputError: the model's inputs do not match the columns.
        """
        columns = self._fitted()
        attached = load_model(model)
        if attached.opset_imports.get("", 0) < CANONICAL_OPSET:
            attached = canonicalize(attached)
        graph = attached.graph
        inputs = {str(value.name): value for value in graph.inputs}
        for name, value in inputs.items():
            if len(inputs) > 1 and name not in {column.name for column in columns}:
                raise self._no_column(name, list(inputs), "the fitted table")
            chosen = columns if len(inputs) == 1 else [c for c in columns if c.name == name]
            _require_width(chosen, name, value.shape, "The fitted table")
        attach_columns(graph, columns, list(self.missing))
        if logits is not None:
            text = attached.metadata_props.get(CALIBRATION)
            calibration = None if text is None else StoredCalibration.from_json(text, "the network")
            names = [c.name for c in columns]
            attach_classes(graph, logits, activation, self.classes_, names, calibration)
        attached.metadata_props[PROPERTY] = self.to_json()
        return as_given(attached, model)

    def raw_columns(self, table: TableLike) -> dict[str, Array]:
        """Converts a table to inputs for a model returned by :meth:`attach`.

        Returns:
            Arrays [rows] by column name, in the order of the model's inputs: float64 with NaN for missing values, or
            strings with "" for missing values.

        Raises:
            InputError: a value cannot be encoded. The message names the row, which an error from the model would not.
        """
        table = as_table(table, self.dialect_)
        columns = {}
        for column in self._fitted():
            values = self._values(table, column.name)
            column.encode(values)
            columns[column.name] = column.raw(values)
        return columns

    def output_name(self, name: str) -> str:
        """Returns the name that :meth:`attach` uses for a new output: "predicted_<name>" if `name` is an input column.

        Otherwise, the name is unchanged.
        """
        return output_name(name, [column.name for column in self.columns_])

    def to_json(self) -> str:
        """Serializes the fitted encoder as JSON text; floats round-trip exactly."""
        settings = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.init}
        columns = [column.to_dict() for column in self._fitted()]
        content = {"version": _VERSION, "settings": settings, "columns": columns, "classes": self.classes_}
        for name, value in (("target_scale", self.target_scale_), ("dialect", self.dialect_)):
            if value is not None:
                content[name] = asdict(value)
        return json.dumps(content)

    @classmethod
    def from_json(cls, text: str, source: str = "") -> TableEncoder:
        """Restores a fitted encoder from the text that :meth:`to_json` returned.

        Args:
            text: JSON text.
            source: name of the file or run that contains the text, for error messages.

        Raises:
            CheckpointError: the text is damaged, or was written by a newer onnxtrain.
        """
        try:
            content = parse_json(text)
            if content["version"] != _VERSION:
                raise ValueError(f"version {content['version']}")
            encoder = cls(**content["settings"])
            encoder.columns_ = [column_from_dict(column) for column in content["columns"]]
            encoder.classes_ = content["classes"]
            if "target_scale" in content:
                encoder.target_scale_ = TargetScale(**content["target_scale"])
            if "dialect" in content:
                encoder.dialect_ = Dialect(**content["dialect"])
        except (KeyError, TypeError, ValueError, AttributeError, OnnxTrainError) as error:
            raise CheckpointError(
                f"Reading '{source}': its property '{PROPERTY}' is not an encoding of a table ({error})."
            ) from error
        return encoder

    def _fitted(self) -> list[Column]:
        if not self.columns_:
            raise InputError("This TableEncoder is not fitted yet: call fit(table) first.")
        return self.columns_

    def _values(self, table: Table, name: str) -> Values:
        return table.values(name, self.missing)

    def _input_names(self, table: Table) -> list[str]:
        """Returns the names of the input columns.

        Raises:
            InputError: a column that was passed does not exist or is not an input, a column has two roles, or there
                are no inputs.
        """
        weights = [] if self.sample_weight is None else [self.sample_weight]
        for name in (*self.target, *self.id, *weights, *self.inputs, *self.categorical):
            table.column(name)
        others = {*self.target, *self.id, *weights}
        inputs = list(self.inputs) or [name for name in table.columns if name not in others]
        for role, names in (("target", self.target), ("id", self.id), ("sample_weight", weights)):
            if both := sorted(set(inputs) & set(names)):
                raise InputError(
                    f"{', '.join(both)} cannot be both in {argument('inputs')} and the {argument(role)}."
                )
        if extra := sorted(set(self.categorical) - {*inputs, *self.target}):
            raise InputError(
                f"{', '.join(extra)} in {argument('categorical')} is neither an input nor the target."
            )
        if not inputs:
            raise InputError(
                f"The table '{table.source}' has no columns besides {some_names(sorted(others))}."
            )
        # A misspelled column would stay unfilled, and the error would name its missing values.
        ruled = set() if self.impute is None or isinstance(self.impute, str) else set(self.impute)
        for name in ruled - {OTHERS}:
            table.column(name)
        if extra := sorted(ruled - {*inputs, OTHERS}):
            raise InputError(f"{', '.join(extra)} in {argument('impute')} is not an input.")
        return inputs

    def _fit_column(self, values: Values, counted: Array, where: str) -> Column:
        if (values.missing | ~counted).all():
            raise InputError(
                f"The table '{values.source}': column '{values.name}' has no values{where}. Leave it out: "
                f"{argument('inputs')}."
            )
        categorical = values.name in self.categorical
        rule = fill_rule(self.impute, values.name)
        if holds_numbers(values, categorical=categorical):
            return NumberColumn.fit(values, counted, rule, scale=self.scale)
        if self.encode is None:
            raise no_encoding(values, categorical=categorical)
        return CategoryColumn.fit(values, counted, rule, how=self.encode, unknown=self.unknown_category)

    def _fit_target(self, table: Table, counted: Array) -> TargetScale:
        """Returns mean and standard deviation of each target column, as scikit-learn's `StandardScaler` computes them.

        Args:
            table: table with the columns.
            counted: bool [rows]; True for the rows from which statistics are computed.

        Raises:
            InputError: there is no target, or it has classes.
        """
        if not self.target or self.classes_ is not None:
            kind = "has classes" if self.target else "is not given"
            raise InputError(
                f"{argument('scale_target')} standardizes numbers to predict, but the target {kind}. Leave it out."
            )
        columns = [self._target_column(table, name, classes=False)[counted] for name in self.target]
        # Like StandardScaler: a constant column is divided by 1.
        return TargetScale([c.mean() for c in columns], [float(c.std()) or 1.0 for c in columns])

    def _target_column(self, table: Table, name: str, *, classes: bool) -> Array:
        """Returns a target column, float64 [rows].

        Args:
            table: table with the column.
            name: name of the column.
            classes: True to convert class names to class numbers, if the target has class names.

        Raises:
            InputError: a value is missing, not a number, or not a known class.
        """
        values = self._values(table, name)
        # A target is not filled: the model would learn the fill.
        if values.missing.any():
            raise InputError(
                f"{values.at(int(values.missing.argmax()))}: the target is missing. Remove such rows."
            )
        if not classes or self.classes_ is None:
            return NumberColumn(name=name).encode(values)[:, 0]
        _require_known_classes(values, self.classes_)
        return CategoryColumn(name=name, categories=self.classes_, how="ordinal").encode(values)[:, 0]

    def _target_array(self, table: Table, spec: InputSpec) -> Array:
        labels = spec.class_labels is not None
        columns = [self._target_column(table, name, classes=labels) for name in self.target]
        # Labels in a column with missing values are floats in many files; quantities stay floats.
        columns = [c.astype(np.int64) if labels and (c == np.floor(c)).all() else c for c in columns]
        array = np.stack(columns, axis=1)
        rank = None if spec.shape is None else len(spec.shape)
        # Some models take targets [rows], some [rows, 1].
        return array[:, 0] if array.shape[1] == 1 and rank in (None, 1) else array

    def _no_column(self, name: str, inputs: Sequence[str], where: str) -> InputError:
        return InputError(
            f"The model has several inputs ({', '.join(inputs)}), which are matched to columns by name; "
            f"{where} has no column '{name}' among its inputs."
        )


def _require_known_classes(values: Values, classes: Sequence[str]) -> None:
    """Raises InputError if a target column contains a class that is not in `classes`."""
    texts, known = values.texts(), set(classes)
    rows = [row for row, text in enumerate(texts) if text not in known]
    if rows:
        found = sorted({str(texts[row]) for row in rows})
        raise InputError(
            f"{values.at(rows[0])}: the model was trained without the class '{texts[rows[0]]}'; its "
            f"classes are {some_names(classes)}. {len(rows):,} of {len(texts):,} rows have unknown classes "
            f"({some_names(found, 5)}). Remove these rows, or train a new run on a table that has all "
            "classes."
        )


def _require_width(columns: Sequence[Column], name: str, shape: Any, what: str) -> None:
    """Raises InputError if the total width of `columns` differs from the width of the model's input.

    Args:
        columns: columns that are concatenated for the input.
        name: name of the input.
        shape: shape of the input. Only the width of a matrix is checked, and only if it is fixed.
        what: beginning of the error message, e.g. "The fitted table".
    """
    width = sum(column.width for column in columns)
    expected = shape[1] if shape is not None and len(shape) == 2 else None
    if isinstance(expected, int) and expected != width:
        listed = some_names([c.name if c.width == 1 else f"{c.name} ({c.width})" for c in columns])
        # For a model that was trained with a number per category.
        one = (
            f", or encode each category as one number: {argument('encode', 'ordinal')}"
            if len(columns) == expected
            else ""
        )
        raise InputError(
            f"{what} has {width} values per row ({listed}), but the input '{name}' of the model takes "
            f"{expected}. Choose columns by {argument('inputs')}{one}."
        )


def _as_input(block: Array, spec: InputSpec) -> Array:
    """Converts encoded columns to the rank and dtype of a model input.

    For an input of rank 1, a single column [rows, 1] becomes [rows]. For an integer input, the values become int64 if
    all of them are whole numbers.

    Args:
        block: encoded columns [rows, width].
        spec: description of the input.
    """
    if spec.shape is not None and len(spec.shape) == 1 and block.shape[1] == 1:
        block = block[:, 0]
    # Fractions stay floats: the trainer has a better message for them.
    is_whole = spec.dtype.held.kind in "iu" and (block == np.floor(block)).all()
    return block.astype(np.int64) if is_whole else block
