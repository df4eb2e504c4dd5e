"""Runs any .onnx file on data, including an exported model that encodes table columns itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort

from onnxtrain.cli._data import TARGETS, Arrays, assign
from onnxtrain.errors import InputError
from onnxtrain.runtime import dtypes
from onnxtrain.runtime.calibration import PROPERTY as CALIBRATION
from onnxtrain.runtime.calibration import StoredCalibration
from onnxtrain.runtime.device import CPU
from onnxtrain.runtime.inputs import check_arguments
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.runtime.session import open_session, run_on_arrays
from onnxtrain.tables import PROPERTY, Table, TableEncoder
from onnxtrain.trainer.data import fill

_BATCH = 32


class FilePredictions(NamedTuple):
    """Outputs of a model file on a dataset.

    Attributes:
        outputs: outputs by name, [samples, ...].
        encoder: table encoder of the model; None if it has none.
        data: the samples.
        calibration: calibration of the model; None if it was not calibrated.
    """

    outputs: Arrays
    encoder: TableEncoder | None
    data: Arrays | Table
    calibration: StoredCalibration | None


def model_predictions(
    path: Path,
    load: Callable[[TableEncoder | None], Arrays | Table],
    source: Path,
    batch_size: int | None,
    *,
    note: bool = True,
) -> FilePredictions:
    """Computes the outputs of the model in an .onnx file.

    Args:
        path: path of the model.
        load: function that loads the samples, given the model's table encoder.
        source: path of the data, for error messages.
        batch_size: samples per batch; None for the model's fixed batch size, or 32 if it is dynamic.
        note: True to print the names of arrays that the model does not read.

    Raises:
        InputError: the data does not match the model, or an output has no batch axis.
    """
    # A plain session, because any tool may have written the file.
    session = open_session(path, "model", CPU, None)
    metadata = session.get_modelmeta().custom_metadata_map
    calibration = file_calibration(metadata, path)
    if PROPERTY not in metadata:
        data = load(None)
        outputs = _plain_predictions(session, path, data, source, batch_size, note=note)
        return FilePredictions(outputs, None, data, calibration)
    encoder = TableEncoder.from_json(metadata[PROPERTY], str(path))
    data = load(encoder)
    if not isinstance(data, Table):
        raise InputError(
            f"The model '{path}' takes the columns of a table; '{source}' is not a table. Pass a .csv, "
            ".tsv or .parquet file."
        )
    columns = [value.name for value in session.get_inputs()]
    sizes = [value.shape[0] for value in session.get_inputs()]
    specs = [
        InputSpec(name, dtypes.BY_NAME["float64"], (_fixed(size),))
        for name, size in zip(columns, sizes, strict=True)
    ]
    feeds = list(encoder.raw_columns(data).values())
    names = [value.name for value in session.get_outputs()]
    outputs = run_in_batches(session, path, names, specs, feeds, batch_size, check=False)
    return FilePredictions(outputs, encoder, data, calibration)


def file_calibration(metadata: Mapping[str, str], path: Path) -> StoredCalibration | None:
    """Returns the calibration in the metadata of a model file; None if there is none."""
    return StoredCalibration.from_json(metadata[CALIBRATION], str(path)) if CALIBRATION in metadata else None


def _fixed(size: object) -> int | None:
    return size if isinstance(size, int) else None


def _plain_predictions(
    session: ort.InferenceSession,
    path: Path,
    data: Arrays | Table,
    source: Path,
    batch_size: int | None,
    *,
    note: bool,
) -> Arrays:
    """Computes the outputs of a model without a table encoder. All of its inputs must be numeric.

    Args:
        session: session of the model.
        path: path of the model, for error messages.
        data: the samples.
        source: path of the data, for error messages.
        batch_size: samples per batch; None for the model's fixed batch size, or 32 if it is dynamic.
        note: True to print the names of arrays that are not read.

    Returns:
        The outputs by name, [samples, ...].

    Raises:
        InputError: the data does not match the model, or an input is not a tensor of numbers.
    """
    specs = input_specs(session, path)
    if not isinstance(data, Table):
        # Without the target, which `evaluate` compares with the outputs, and `predict` ignores.
        inputs = {spec.name for spec in specs}
        arrays = {name: array for name, array in data.items() if name in inputs or name not in TARGETS}
    else:
        # A single input takes all columns; with several inputs, each takes the column with its name.
        columns = [] if len(specs) == 1 else [spec.name for spec in specs]
        arrays = TableEncoder(inputs=columns).fit(data).arrays(data, specs)
    x, _ = assign(specs, (), arrays, source, note=note)
    feeds = [cast_to_input(np.asarray(x[spec.name]), spec) for spec in specs]
    names = [value.name for value in session.get_outputs()]
    return run_in_batches(session, path, names, specs, feeds, batch_size, check=True)


def input_specs(session: ort.InferenceSession, path: Path) -> list[InputSpec]:
    """Returns the inputs of a model.

    Args:
        session: session of the model.
        path: path of the model, for error messages.

    Raises:
        InputError: an input is not a tensor of numbers.
    """
    specs = []
    for value in session.get_inputs():
        if value.type not in dtypes.BY_ORT:
            raise InputError(
                f"The input '{value.name}' of '{path}' is a {value.type}, which is not a tensor of numbers."
            )
        shape = tuple(_fixed(d) for d in value.shape)
        specs.append(InputSpec(value.name, dtypes.BY_ORT[value.type], shape))
    return specs


def run_in_batches(
    session: ort.InferenceSession,
    path: Path,
    outputs: Sequence[str],
    specs: Sequence[InputSpec],
    feeds: Sequence[np.ndarray[Any, Any]],
    batch_size: int | None,
    *,
    check: bool,
) -> Arrays:
    """Runs a session batch by batch.

    Args:
        session: session of the model.
        path: path of the model, for error messages.
        outputs: names of the outputs to compute.
        specs: inputs of the model.
        feeds: arrays for the inputs, in the same order.
        batch_size: samples per batch; None for the model's fixed batch size, or 32 if it is dynamic.
        check: True to check the arrays' dtypes and shapes against `specs`.

    Returns:
        The outputs by name, [samples, ...].
    """
    parts: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in outputs}
    for batch, count in _batches(feeds, specs, batch_size):
        checked = check_arguments(specs, batch) if check else batch
        named = {spec.name: value for spec, value in zip(specs, checked, strict=True)}
        values = run_on_arrays(session, outputs, named)
        for name, value in zip(outputs, values, strict=True):
            # A value for the whole batch, such as a mean, belongs to no sample.
            if np.ndim(value) == 0 or len(value) != len(batch[0]):
                raise InputError(
                    f"Predicting: the output '{name}' of '{path}' does not have one value per sample."
                )
            parts[name].append(np.asarray(value)[:count])
    whole = {name: np.concatenate(values) for name, values in parts.items()}
    # ONNX Runtime returns strings as Python objects, which .npz files cannot hold.
    return {name: array.astype(str) if array.dtype == object else array for name, array in whole.items()}


def cast_to_input(array: np.ndarray[Any, Any], spec: InputSpec) -> np.ndarray[Any, Any]:
    """Casts an array to an input's dtype if both dtypes are floating point or both are integer.

    Other arrays are returned unchanged.
    """
    wanted = spec.dtype.held
    if array.dtype.kind == wanted.kind == "f" or (array.dtype.kind in "iu" and wanted.kind in "iu"):
        return array.astype(wanted)
    return array


def _batches(
    arrays: Sequence[np.ndarray[Any, Any]], specs: Sequence[InputSpec], asked: int | None
) -> Iterator[tuple[list[np.ndarray[Any, Any]], int]]:
    """Yields each batch as a list with one array per input, together with its number of samples.

    If the model has a fixed batch size, an incomplete last batch is padded by repeating its last row. The padding is
    not counted.

    Args:
        arrays: arrays for the inputs.
        specs: inputs of the model, in the same order.
        asked: the requested batch size; None for the model's fixed batch size, or 32 if it is dynamic.

    Raises:
        InputError: the arrays differ in length or are empty, or `asked` differs from the fixed batch size.
    """
    lengths = {len(array) if array.ndim else 0 for array in arrays}
    fixed = {spec.shape[0] for spec in specs if spec.shape and isinstance(spec.shape[0], int)}
    if len(lengths) != 1 or 0 in lengths or len(fixed) > 1:
        raise InputError("The inputs do not have the same number of samples along axis 0, or are empty.")
    size = fixed.pop() if fixed else asked or _BATCH
    if asked is not None and asked != size:
        raise InputError(
            f"--batch-size is {asked}, but the model has a fixed batch size of {size}. Leave the option out."
        )
    for start in range(0, lengths.pop(), size):
        batch = [array[start : start + size] for array in arrays]
        count = len(batch[0])
        if any(isinstance(spec.shape[0], int) for spec in specs if spec.shape) and count < size:
            batch = [fill(array, size - count) for array in batch]
        yield batch, count
