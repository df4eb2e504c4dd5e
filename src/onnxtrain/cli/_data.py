"""Loads a command's data from an .npz file or a table, and assigns arrays to inputs and targets by name."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.cli._declared import flag
from onnxtrain.cli._options import TextOptions
from onnxtrain.cli._output import info
from onnxtrain.errors import InputError
from onnxtrain.images import ImageFolder
from onnxtrain.runtime.manifest import InputSpec, Manifest
from onnxtrain.tables import Dialect, Table, TableEncoder, read_table, table_suffix
from onnxtrain.texts import TextPairs

Arrays = dict[str, np.ndarray[Any, Any]]

TARGETS = ("y", "labels", "target")
"""Names of the target's array in an .npz file for an .onnx file, which doesn't say what the target was called."""


def load_data(path: Path, text: TextOptions, like: Dialect | None = None) -> Arrays | Table | ImageFolder:
    """Loads an .npz file or a table, or finds the images in a folder.

    Args:
        path: path of the file or folder.
        text: how to read a text file.
        like: dialect of the table that a run was trained on, for what the file leaves open.

    Raises:
        InputError: the file is missing or damaged, or can be read in several ways; or the folder contains no images.
    """
    if path.is_dir():
        return ImageFolder(path)
    if not path.is_file() or table_suffix(path) is None:
        arrays = load_arrays(path)
        if given := [flag(name) for name, value in vars(text).items() if value is not None]:
            raise InputError(
                f"{', '.join(given)} are for text files with a table (.csv, .tsv); '{path}' is not one."
            )
        return arrays
    table = read_table(
        path, separator=text.separator, decimal=text.decimal, encoding=text.encoding, like=like
    )
    # A new file may be read in another way than the table of the run. That table's summary says how it is read.
    if like is not None and table.dialect not in (None, like):
        info(f"'{path}': {table.dialect.description or 'fields separated by commas, decimal point'}")
    return table


def load_arrays(path: Path) -> Arrays:
    """Loads the arrays of an .npz file.

    Raises:
        InputError: the file is missing, is not an .npz file, or contains Python objects, which are not loaded.
    """
    if not path.is_file():
        raise InputError(f"Reading the data '{path}': there is no such file.")
    remedy = "Write it with numpy.savez(path, x=..., y=...)."
    # For other files, numpy's own error message is about pickles.
    if not zipfile.is_zipfile(path):
        raise InputError(
            f"Reading the data '{path}': it is not an .npz file. {remedy} Tables are .csv, .tsv or .parquet files: "
            "save a table in another format (.xlsx) as one of these."
        )
    try:
        # Unpickling can run arbitrary code.
        with np.load(path, allow_pickle=False) as content:
            return {name: content[name] for name in content.files}
    except Exception as error:
        # numpy does not wrap the errors of zipfile, zlib and its parsers, which have many types.
        objects = "allow_pickle" in str(error)
        problem = "an array holds Python objects instead of numbers" if objects else error
        raise InputError(f"Reading the data '{path}': {problem}. {remedy}") from error


def to_arrays(
    data: Arrays | Table | TextPairs,
    encoder: TableEncoder | None,
    manifest: Manifest,
    targets: Sequence[InputSpec],
) -> Arrays:
    """Encodes a table as arrays by name; returns arrays unchanged, and an empty dict for texts, which are not encoded.

    Args:
        data: table, arrays or pairs of texts.
        encoder: the run's table encoder; None for a run on arrays.
        manifest: manifest of the run, with the inputs to encode.
        targets: targets to encode, as `label_targets` returns them; empty for prediction.

    Raises:
        InputError: the table does not match the run, or `data` is a table, but the run was trained on arrays.
    """
    if not isinstance(data, Table):
        return {} if isinstance(data, TextPairs) else data
    if encoder is None:
        raise InputError(
            "The run was not trained on a table, so it has no encoding for the columns of "
            f"'{data.source}'. Pass an .npz file."
        )
    return encoder.arrays(data, manifest.inputs, targets)


def assign(
    inputs: Sequence[InputSpec],
    targets: Sequence[InputSpec],
    arrays: Arrays,
    path: Path,
    *,
    note: bool = True,
) -> tuple[Any, Any]:
    """Picks the arrays for a model's inputs and targets by name.

    If there is only one input, its array may also be named `x`; if there is only one target, `y`.

    Args:
        inputs: the inputs.
        targets: the targets. Sample weights among them are skipped.
        arrays: arrays by name.
        path: path of the data, for messages.
        note: True to print the names of unused arrays.

    Returns:
        Two dicts: arrays of the inputs by name, and arrays of the targets by name. The second is None if there are no
        targets.

    Raises:
        InputError: an array is missing.
    """
    # The target for sample weights is left out: without an array, all samples have weight 1.
    targets = [spec for spec in targets if not spec.sample_weight]
    names = {spec.name for spec in (*inputs, *targets)}
    # Not an error, because a file may contain data for several models. The note shows misspelled names.
    if note and (unused := sorted(set(arrays) - names - {"x", "y"})):
        info(f"Not used from '{path}': {', '.join(unused)}")
    x = _pick(arrays, inputs, "x", path)
    return x, (_pick(arrays, targets, "y", path) if targets else None)


def _pick(arrays: Arrays, specs: Sequence[InputSpec], short: str, path: Path) -> Mapping[str, Any]:
    # Exporters use names such as "input.1", people `x` and `y`.
    if len(specs) == 1 and specs[0].name not in arrays and short in arrays:
        return {specs[0].name: arrays[short]}
    missing = [spec.name for spec in specs if spec.name not in arrays]
    if missing:
        alternative = f" (or {short})" if len(specs) == 1 else ""
        raise InputError(
            f"The data '{path}' lacks {', '.join(missing)}{alternative}; it holds {', '.join(arrays) or 'nothing'}."
        )
    return {spec.name: arrays[spec.name] for spec in specs}
