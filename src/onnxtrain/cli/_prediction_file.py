"""Writes the predictions of `onnxtrain predict` to a file."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain._printable import printable
from onnxtrain.cli._data import Arrays
from onnxtrain.cli._output import print_next
from onnxtrain.errors import InputError
from onnxtrain.runtime.atomic import replace_file
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.trainer._optional import optional


def prediction_file(targets: Sequence[InputSpec]) -> str:
    """Returns the name of a file in which `onnxtrain predict` can write the predictions for a run.

    Args:
        targets: targets of the loss. If each sample has one number or class, its prediction is a row of a table.
    """
    in_rows = bool(targets) and all(
        spec.shape is not None
        and (len(spec.shape) == 1 or (len(spec.shape) == 2 and spec.dtype.held.kind == "f"))
        for spec in targets
    )
    return "predictions.csv" if in_rows else "predictions.npz"


def print_prediction_command(source: Path, targets: Sequence[InputSpec]) -> None:
    """Prints the `onnxtrain predict` command for a run, or a model with these targets."""
    print_next("predict", source, "--data", "FILE", "-o", prediction_file(targets))


def write_file(
    output: Path, ids: Mapping[str, np.ndarray[Any, Any]], arrays: Arrays, classes: Sequence[str] | None
) -> None:
    """Writes predictions to an .npz, .csv or .parquet file.

    In a table, an output [samples, n] takes n columns, e.g. one per class.

    Args:
        output: file to write; its suffix determines the format.
        ids: columns of the data to write first, by name.
        arrays: outputs by name, [samples, ...].
        classes: names of the classes for column names such as "probability_fraud"; None to number the columns.

    Raises:
        InputError: an output has more than two axes, a name occurs twice, or pyarrow is missing.
    """
    if twice := sorted(set(ids) & set(arrays)):
        raise InputError(f"--id {twice[0]}: an output has the same name. Rename the column.")
    if output.suffix.lower() == ".npz":
        # An .npz file without pickles cannot hold arrays of objects.
        texts = {name: np.array([str(value) for value in column]) for name, column in ids.items()}
        with replace_file(output) as file:
            np.savez(file, **texts, **arrays)  # type: ignore[arg-type]
        return
    columns: dict[str, Any] = dict(ids)
    for name, array in arrays.items():
        flat = array.reshape(len(array), -1)
        if array.ndim > 2:
            raise InputError(
                f"The output '{name}' has the shape {list(array.shape)}, which does not fit a column of a table. Write "
                "an .npz file."
            )
        if array.ndim == 1 or flat.shape[1] == 1:
            columns[name] = flat[:, 0]
            continue
        ends = classes if classes is not None and len(classes) == flat.shape[1] else range(flat.shape[1])
        columns |= {f"{name}_{end}": flat[:, index] for index, end in enumerate(ends)}
    frame = optional("pandas", "Writing a table", "'onnxtrain[data]'").DataFrame(columns)
    # Formatted in memory, so that the file is replaced atomically.
    content = io.BytesIO()
    if output.suffix.lower() == ".csv":
        # Column names are escaped. Values are not, because other programs compare them with the original categories.
        frame.to_csv(content, index=False, header=list(map(printable, columns)))
    else:
        try:
            frame.to_parquet(content, index=False)
        except ImportError as error:
            raise InputError("Parquet files need pyarrow: pip install 'onnxtrain[data]'.") from error
    with replace_file(output) as file:
        file.write(content.getvalue())
