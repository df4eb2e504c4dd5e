"""Creates a table encoder from the options of a command, and fits it to the training rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxtrain.cli._options import TableOptions
from onnxtrain.errors import InputError
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.selection import some_names
from onnxtrain.tables import Table, TableEncoder, is_fill_rule
from onnxtrain.trainer.data._arrays import split_order

_ALL = "*"


def chosen_encoder(
    options: TableOptions, table: Table, sample_weight: str | None = None, *, network: bool = False
) -> TableEncoder:
    """Creates the encoder from the options, without fitting it.

    Args:
        options: options of the command.
        table: the training table. Its column names show whether a comma in an option is part of a name.
        sample_weight: column given with `--sample-weight`; None for equal weights.
        network: True for a network that the command makes, with other defaults than a model that the user passes.

    Raises:
        InputError: an option names a column that does not exist, or options cannot be combined.
    """
    return TableEncoder(
        target=_names(options.target, table),
        inputs=_names(options.inputs, table),
        id=_names(options.id, table),
        sample_weight=sample_weight,
        missing=options.missing or (),
        impute=parse_impute(options.impute, table),
        categorical=_names(options.categorical, table),
        encode="ordinal" if options.ordinal else "one-hot" if options.one_hot or network else None,
        unknown_category=options.unknown_category,
        scale=network if options.scale is None else options.scale,
    )


def fit_encoder(
    encoder: TableEncoder,
    table: Table,
    targets: Sequence[InputSpec] | None,
    *,
    validation: float | None,
    seed: int,
    stratify: bool,
) -> None:
    """Fits an encoder to a table, without the rows that the trainer will split off for validation.

    Args:
        encoder: encoder to fit.
        table: the training table.
        targets: targets of the model; None if there is no model yet, which will have one.
        validation: fraction of the rows to be split off for validation; None for no split.
        seed: seed of the run.
        stratify: True if the same fraction of each class will be split off.

    Raises:
        InputError: the table does not match the encoder or the model, or `--target` is missing or superfluous.
    """
    needs_target = targets is None or bool(targets)
    if needs_target != bool(encoder.target):
        raise InputError(
            f"The table '{table.source}': name the column to predict with --target; its columns are "
            f"{some_names(table.columns)}."
            if needs_target
            else "The model computes its loss from its inputs alone; leave --target out."
        )
    if validation is None:
        encoder.fit(table)
        return
    labels = None
    if stratify and needs_target:
        # Class indices do not depend on the split.
        labels = encoder.fit(table).transform_target(table).reshape(-1).astype(np.int64)
    rows, _ = split_order(len(table), validation, seed, labels)
    encoder.fit(table, rows=rows)


def parse_impute(texts: Sequence[str] | None, table: Table) -> dict[str, str]:
    """Parses the values of `--impute`: RULE for all columns, or COLUMN=RULE for a single column.

    Returns:
        The rules by column. The rule with key "*" applies to all other columns.

    Raises:
        InputError: a value is not a rule, its column does not exist, or a column has two rules.
    """
    rules: dict[str, str] = {}
    texts_of: dict[str, str] = {}
    for text in texts or ():
        name, rule = _parse_rule(text, table)
        # The order of options has no meaning, so a second rule does not replace the first one.
        if name in rules:
            where = "all columns" if name == _ALL else f"the column '{name}'"
            raise InputError(f"--impute gives two rules for {where}: {texts_of[name]} and {text}.")
        rules[name], texts_of[name] = rule, text
    return rules


def _parse_rule(text: str, table: Table) -> tuple[str, str]:
    # Columns are tried first, because a column may be called "value", and names may contain "=".
    for name in sorted(table.columns, key=len, reverse=True):
        if text.startswith(f"{name}=") and is_fill_rule(text[len(name) + 1 :]):
            return name, text[len(name) + 1 :]
    if is_fill_rule(text):
        return _ALL, text
    name, equals, rest = text.partition("=")
    if equals and is_fill_rule(rest):
        # `column` raises an error that lists the columns.
        table.column(name)
    raise InputError(
        f"--impute is '{text}'; pass mean, median, most_frequent or value=VALUE for all columns, or "
        "COLUMN=RULE for a single column, e.g. age=median."
    )


def _names(given: Sequence[str] | None, table: Table) -> list[str]:
    """Parses an option's values as column names. Each value is one name, or several names separated by commas.

    Raises:
        InputError: a column does not exist.
    """
    names: list[str] = []
    for text in given or ():
        # A name may itself contain a comma.
        names += (
            [text] if text in table.columns else [name.strip() for name in text.split(",") if name.strip()]
        )
    for name in names:
        table.column(name)
    return names
