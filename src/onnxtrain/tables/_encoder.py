"""Encodes tables as arrays: chooses the columns, and turns texts and missing values into numbers.

The encoding (categories, means, names of the classes) is learned in training and kept in the run, so that
evaluation, prediction and the exported model encode their tables in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from onnxtrain.cli._options import TableOptions
from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.runtime.json_text import parse_json
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.selection import some_names
from onnxtrain.tables._columns import NUMBER, ORDINAL, Column, is_numeric
from onnxtrain.tables._impute import ALL, parse_impute
from onnxtrain.tables._table import Table
from onnxtrain.trainer.data._arrays import split_order

PROPERTY = "onnxtrain.cli.table"
"""Checkpoint property that holds the encoding, as JSON text."""

# Texts that pandas.read_csv takes for missing by default, as onnxtrain did before it had `--missing`.
_EARLIER_MISSING = (
    *(
        "#N/A",
        "#N/A N/A",
        "#NA",
        "-1.#IND",
        "-1.#QNAN",
        "-NaN",
        "-nan",
        "1.#IND",
        "1.#QNAN",
        "<NA>",
        "N/A",
        "NA",
    ),
    *("NULL", "NaN", "None", "n/a", "nan", "null"),
)


class Split(NamedTuple):
    """Split of the rows of a table into those to train on and a random fraction to validate with.

    Attributes:
        fraction: fraction to validate with, e.g. 0.1.
        seed: seed of the run.
        stratify: True to split off the same fraction of each class.
    """

    fraction: float
    seed: int
    stratify: bool


@dataclass(frozen=True)
class Encoding:
    """Encoding of a table as arrays.

    Attributes:
        columns: encodings of the input columns, in the model's order.
        targets: names of the target's columns.
        classes: names of the classes in the order of their numbers, for a target of texts; None for numbers.
        missing: texts that count as missing, besides the empty one, e.g. ("NA",).
        id: names of columns that are no inputs and are written beside the predictions.
        weight: name of the column of sample weights; None for equal weights.
    """

    columns: list[Column]
    targets: list[str]
    classes: list[str] | None = None
    missing: Sequence[str] = ()
    id: Sequence[str] = ()
    weight: str | None = None

    @classmethod
    def learn(
        cls,
        table: Table,
        options: TableOptions,
        targets: Sequence[InputSpec],
        weight: str | None = None,
        split: Split | None = None,
    ) -> Encoding:
        """Learns the encoding from a table to train on.

        Args:
            table: table to train on.
            options: columns, and their encoding.
            targets: targets of the model.
            weight: name of the column of sample weights; None for equal weights.
            split: rows that the trainer will split off, which means, medians and frequencies are not learned from;
                None if it trains on all.

        Raises:
            InputError: a column is missing, or holds values that the options do not encode.
        """
        options.check()
        table = replace(table, missing=tuple(options.missing or ()))
        target_names = _names(options.target, table)
        if bool(targets) != bool(target_names):
            raise InputError(
                f"The table '{table.path}': name the column to learn by --target; its columns are "
                f"{some_names(table.columns)}."
                if targets
                else "The model computes its loss from its inputs alone; leave --target out."
            )
        ids = _names(options.id, table)
        # One name, not several with commas as other options: a row has one weight.
        weights = [] if weight is None else [weight]
        for name in weights:
            table.column(name)
        # Without --inputs all columns but these, in the order of the file.
        others = {*target_names, *ids, *weights}
        inputs = _names(options.inputs, table) or [n for n in table.columns if n not in others]
        for option, names in (("--target", target_names), ("--id", ids), ("--sample-weight", weights)):
            # A target among the inputs would be learned by heart, and missing when predicting.
            if both := sorted(set(inputs) & set(names)):
                raise InputError(f"{', '.join(both)} cannot be among --inputs and be the {option}.")
        categorical = _names(options.categorical, table)
        if extra := sorted(set(categorical) - {*inputs, *target_names}):
            raise InputError(f"{', '.join(extra)} of --categorical is neither an input nor the target.")
        labels = bool(targets) and targets[0].class_labels is not None
        classes = target_classes(table, options) if labels else None
        rows = None
        if split is not None:
            of_rows = None
            if split.stratify and targets:
                # The trainer splits by the same labels.
                of_rows = (
                    cls([], target_names, classes)._target(table, targets[0]).reshape(-1).astype(np.int64)
                )
            rows, _ = split_order(len(table.frame), split.fraction, split.seed, of_rows)
        # A misspelt column would be left with its gaps, and the error would name the gaps.
        rules = parse_impute(options.impute, table)
        if extra := sorted(set(rules) - {*inputs, ALL}):
            raise InputError(f"{', '.join(extra)} of --impute is no input.")
        columns = [
            Column.learn(
                table,
                name,
                options,
                categorical=name in categorical,
                fill=rules.get(name, rules.get(ALL)),
                rows=rows,
            )
            for name in inputs
        ]
        return cls(columns, target_names, classes, tuple(table.missing), tuple(ids), weight)

    def sample_weights(self, table: Table) -> np.ndarray[Any, Any] | None:
        """Reads the sample weights of a table, float64 [rows]; None if the run has none.

        Raises:
            InputError: the column is missing, or holds other things than numbers.
        """
        if self.weight is None:
            return None
        return Column(self.weight, NUMBER).numbers(replace(table, missing=self.missing))[:, 0]

    @classmethod
    def from_json(cls, text: str, source: str) -> Encoding:
        """Reads the text of :meth:`to_json`. Raises CheckpointError, which names `source`: the text is damaged."""
        try:
            content = parse_json(text)
            if content["version"] != 1:
                raise ValueError(f"version {content['version']}")
            columns = [Column(**column) for column in content["columns"]]
            missing, ids = (
                [str(item) for item in content.get(key, default)]
                for key, default in (("missing", _EARLIER_MISSING), ("id", ()))
            )
            targets = [str(name) for name in content["targets"]]
            # Runs of earlier versions have no sample weights.
            weight = content.get("weight")
            return cls(
                columns,
                targets,
                content["classes"],
                tuple(missing),
                tuple(ids),
                None if weight is None else str(weight),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"Reading the run '{source}': its property '{PROPERTY}' is no encoding of a table ({error})."
            ) from error

    def output_name(self, name: str) -> str:
        """Names an output besides those of the network; a column may have its name already.

        >>> Encoding([Column("class", "number")], ["fate"]).output_name("class")
        'predicted_class'
        """
        return f"predicted_{name}" if any(column.name == name for column in self.columns) else name

    def to_json(self) -> str:
        """Writes the encoding as JSON text; floats are kept exactly."""
        return json.dumps({"version": 1, **asdict(self)})

    def arrays(
        self, table: Table, inputs: Sequence[InputSpec], targets: Sequence[InputSpec]
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Encodes a table as arrays for inputs and targets. Raises InputError: the table does not fit the model."""
        table = replace(table, missing=self.missing)
        blocks = [column.numbers(table) for column in self.columns]
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        # One input takes all columns side by side.
        if len(inputs) == 1:
            arrays[inputs[0].name] = _fitted(np.concatenate(blocks, axis=1), inputs[0], self.columns, table)
        else:
            for spec in inputs:
                indices = [i for i, column in enumerate(self.columns) if column.name == spec.name]
                if not indices:
                    names = ", ".join(item.name for item in inputs)
                    raise InputError(
                        f"The model has several inputs ({names}), each of which is the column of its name; the table "
                        f"'{table.path}' has no column '{spec.name}' among its inputs."
                    )
                arrays[spec.name] = _fitted(blocks[indices[0]], spec, [self.columns[indices[0]]], table)
        if targets:
            arrays[targets[0].name] = self._target(table, targets[0])
        return arrays

    def _target(self, table: Table, spec: InputSpec) -> np.ndarray[Any, Any]:
        columns = []
        for name in self.targets:
            missing = table.values(name).missing
            # A target cannot be imputed: the model would learn the fill.
            if missing.any():
                raise InputError(
                    f"{table.at(name, int(missing.argmax()))}: the target is missing. Remove such rows."
                )
            if self.classes is not None:
                _require_known_classes(table, name, self.classes)
                column = Column(name, ORDINAL, self.classes)
                columns.append(column.numbers(table)[:, 0].astype(np.int64))
                continue
            values = Column(name, NUMBER).numbers(table)[:, 0]
            # Class labels in a column of floats are the rule in .csv files with gaps; quantities stay floats.
            is_whole = spec.class_labels is not None and (values == np.floor(values)).all()
            columns.append(values.astype(np.int64) if is_whole else values)
        array = np.stack(columns, axis=1)
        rank = None if spec.shape is None else len(spec.shape)
        # A model may expect targets [rows] or [rows, 1]; the manifest tells.
        return array[:, 0] if array.shape[1] == 1 and rank in (None, 1) else array


def _require_known_classes(table: Table, name: str, classes: Sequence[str]) -> None:
    """Raises InputError for a class of the target that the table of training did not have."""
    texts = table.values(name).texts()
    rows = [row for row, text in enumerate(texts) if text not in classes]
    if rows:
        found = sorted({str(texts[row]) for row in rows})
        raise InputError(
            f"{table.at(name, rows[0])}: the model was trained without the class '{texts[rows[0]]}'; its "
            f"classes are {some_names(classes)}. {len(rows):,} of {len(texts):,} rows have classes that it does not "
            f"know ({some_names(found, 5)}). Remove these rows, or train a new run on a table that has all classes."
        )


def target_classes(table: Table, options: TableOptions) -> list[str] | None:
    """Lists the names of the classes, sorted, if the target is one column of texts; None for numbers.

    Raises:
        InputError: the column does not exist, or holds numbers and texts.
    """
    table = replace(table, missing=tuple(options.missing or ()))
    target_names = _names(options.target, table)
    if len(target_names) != 1:
        return None
    values = table.values(target_names[0])
    if is_numeric(
        table, target_names[0], values, categorical=target_names[0] in _names(options.categorical, table)
    ):
        return None
    return sorted({text for text in values.texts() if text is not None})


def _fitted(
    block: np.ndarray[Any, Any], spec: InputSpec, columns: Sequence[Column], table: Table
) -> np.ndarray[Any, Any]:
    """Shapes and casts encoded columns for an input of the model."""
    shape = spec.shape
    if shape is not None and len(shape) == 1 and block.shape[1] == 1:
        block = block[:, 0]
    width = shape[1] if shape is not None and len(shape) == 2 else None
    if isinstance(width, int) and width != block.shape[1]:
        listed = some_names([c.name if c.width == 1 else f"{c.name} ({c.width})" for c in columns])
        raise InputError(
            f"The table '{table.path}' gives {block.shape[1]} numbers per row ({listed}), and the input '{spec.name}' "
            f"of the model takes {width}. Choose columns by --inputs."
        )
    kind = spec.dtype.held.kind
    # Whole floats only: the trainer refuses fractions for an integer input with a better message.
    return block.astype(np.int64) if kind in "iu" and (block == np.floor(block)).all() else block


def _names(given: list[str] | None, table: Table) -> list[str]:
    """Lists the columns that an option names; a value is the name of a column, or several separated by commas."""
    names: list[str] = []
    for text in given or ():
        names += (
            # A name of a column may itself contain a comma.
            [text] if text in table.columns else [name.strip() for name in text.split(",") if name.strip()]
        )
    for name in names:
        table.column(name)
    return names
