"""`onnxtrain evaluate`, `predict` and `export`: what a run, or a model, is used for."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.cli._data import Arrays, assign, load_data, to_arrays
from onnxtrain.cli._output import print_json, print_table, summary_table
from onnxtrain.cli._remember import saved_encoding
from onnxtrain.cli._tables import TABLE_SUFFIXES, Encoding, Table, TableOptions, frame_library
from onnxtrain.errors import InputError, ModelError
from onnxtrain.runtime import dtypes
from onnxtrain.runtime.atomic import replace_file
from onnxtrain.runtime.device import CPU
from onnxtrain.runtime.inputs import check_arguments
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.runtime.session import open_session
from onnxtrain.trainer import Trainer

__all__ = ["evaluate_run", "export_run", "write_predictions"]

_BATCH = 32


def evaluate_run(directory: Path, path: Path, batch_size: int | None, json: bool) -> None:
    """Prints what `Trainer.evaluate` returns."""
    trainer, encoding = _open(directory)
    arrays = to_arrays(load_data(path), encoding, trainer.manifest)
    x, y = assign(trainer.manifest.inputs, trainer.manifest.targets, arrays, path)
    values = trainer.evaluate(x, y, batch_size=batch_size)
    if json:
        print_json({"directory": str(directory), "data": str(path), **values})
        return
    print_table(summary_table(f"{directory} on {path.name}", [(k, f"{v:,.6g}") for k, v in values.items()]))


def export_run(directory: Path, output: Path, outputs: Sequence[str] | None, json: bool) -> None:
    """Writes the trained model."""
    trainer, _ = _open(directory)
    trainer.export(output, list(outputs) if outputs else None)
    names = list(outputs) if outputs else trainer.outputs
    if json:
        print_json({"directory": str(directory), "model": str(output), "outputs": names})
        return
    print_table(f"Trained model: {output} (outputs: {', '.join(names)})")


def write_predictions(source: Path, path: Path, output: Path, batch_size: int | None, json: bool) -> None:
    """Writes the outputs for each sample of the data.

    Raises:
        InputError: the kind of file is not known, or an output does not fit into a table.
    """
    suffix = output.suffix.lower()
    if suffix not in (".npz", *TABLE_SUFFIXES):
        raise InputError(f"--output is '{output}'; choose an .npz, .csv or .parquet file.")
    data = load_data(path)
    if source.is_dir():
        arrays, classes = _run_predictions(source, data, path, batch_size)
    else:
        arrays, classes = _model_predictions(source, data, path, batch_size), None
    try:
        _write(output, arrays, classes)
    except OSError as error:
        raise ModelError(f"Writing the predictions to '{output}' failed: {error}.") from error
    samples = len(next(iter(arrays.values())))
    if json:
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        print_json({"predictions": str(output), "samples": samples, "outputs": shapes})
        return
    print_table(f"Predictions for {samples:,} samples: {output} ({', '.join(arrays)})")


def _open(directory: Path) -> tuple[Trainer, Encoding | None]:
    """Returns a run and how its tables become arrays."""
    trainer = Trainer.resume(directory)
    return trainer, saved_encoding(trainer, directory)


def _run_predictions(
    directory: Path, data: Arrays | Table, path: Path, batch_size: int | None
) -> tuple[Arrays, list[str] | None]:
    """Returns the outputs of a run, the class of each sample, and the names of the classes."""
    trainer, encoding = _open(directory)
    manifest = trainer.manifest
    arrays = to_arrays(data, encoding, manifest, targets=False)
    x, _ = assign(manifest.inputs, (), _without_targets(arrays, manifest.targets), path)
    result = trainer.predict(x, batch_size=batch_size)
    outputs = result if isinstance(result, dict) else {trainer.outputs[0]: result}
    classes = encoding.classes if encoding is not None else None
    labels = manifest.targets[0].class_labels if manifest.targets else None
    scores = next(iter(outputs.values()))
    if labels is not None and scores.ndim == 2 and "class" not in outputs and labels.count == scores.shape[1]:
        best = scores.argmax(axis=1)
        known = classes is not None and len(classes) <= scores.shape[1]
        names = [*(classes or ()), *map(str, range(len(classes or ()), scores.shape[1]))] if known else None
        outputs["class"] = best if names is None else np.array(names)[best]
        classes = names
    return outputs, classes


def _without_targets(arrays: Arrays, targets: Sequence[InputSpec]) -> Arrays:
    return {name: array for name, array in arrays.items() if name not in {"y", *(t.name for t in targets)}}


def _model_predictions(path: Path, data: Arrays | Table, source: Path, batch_size: int | None) -> Arrays:
    """Returns the outputs of an ONNX model that nobody has trained here.

    Raises:
        InputError: the data does not fit, or an output has no axis for the samples.
    """
    session = open_session(path, "model", CPU, None)
    specs = []
    for value in session.get_inputs():
        if value.type not in dtypes.BY_ORT:
            raise InputError(
                f"The input '{value.name}' of '{path}' is a {value.type}, which is no tensor of numbers."
            )
        shape = tuple(d if isinstance(d, int) else None for d in value.shape)
        specs.append(InputSpec(value.name, dtypes.BY_ORT[value.type], shape))
    names = [value.name for value in session.get_outputs()]
    if not isinstance(data, Table):
        arrays = data
    else:
        columns = None if len(specs) == 1 else [spec.name for spec in specs]
        arrays = Encoding.learn(data, TableOptions(inputs=columns), ()).arrays(data, specs, ())
    x, _ = assign(specs, (), arrays, source)
    feeds = [_cast(np.asarray(x[spec.name]), spec) for spec in specs]
    parts: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in names}
    for batch, count in _batches(feeds, specs, batch_size):
        checked = check_arguments(specs, batch)
        values = session.run(names, {spec.name: value for spec, value in zip(specs, checked, strict=True)})
        for name, value in zip(names, values, strict=True):
            if np.ndim(value) == 0 or len(value) != len(batch[0]):
                raise InputError(f"Predicting: the output '{name}' of '{path}' has no value per sample.")
            parts[name].append(np.asarray(value)[:count])
    return {name: np.concatenate(values) for name, values in parts.items()}


def _cast(array: np.ndarray[Any, Any], spec: InputSpec) -> np.ndarray[Any, Any]:
    """Returns floats in the type of a float input, and integers in that of an integer input."""
    wanted = spec.dtype.storage
    if array.dtype.kind == wanted.kind == "f" or (array.dtype.kind in "iu" and wanted.kind in "iu"):
        return array.astype(wanted)
    return array


def _batches(
    arrays: Sequence[np.ndarray[Any, Any]], specs: Sequence[InputSpec], asked: int | None
) -> Iterator[tuple[list[np.ndarray[Any, Any]], int]]:
    """Yields batches, and how many samples of each count: a fixed batch is filled up with the last one.

    Raises:
        InputError: the arrays do not have as many samples each, or none, or the batch is fixed otherwise.
    """
    lengths = {len(array) if array.ndim else 0 for array in arrays}
    fixed = {spec.shape[0] for spec in specs if spec.shape and isinstance(spec.shape[0], int)}
    if len(lengths) != 1 or 0 in lengths or len(fixed) > 1:
        raise InputError("The inputs do not all have the samples along axis 0, or there are none.")
    size = fixed.pop() if fixed else asked or _BATCH
    if asked is not None and asked != size:
        raise InputError(
            f"--batch-size is {asked}, but the model takes exactly {size} samples. Leave it out."
        )
    for start in range(0, lengths.pop(), size):
        batch = [array[start : start + size] for array in arrays]
        count = len(batch[0])
        if any(isinstance(spec.shape[0], int) for spec in specs if spec.shape) and count < size:
            batch = [np.concatenate([array, np.repeat(array[-1:], size - count, axis=0)]) for array in batch]
        yield batch, count


def _write(output: Path, arrays: Arrays, classes: list[str] | None) -> None:
    if output.suffix.lower() == ".npz":
        with replace_file(output) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        return
    columns: dict[str, np.ndarray[Any, Any]] = {}
    for name, array in arrays.items():
        flat = array.reshape(len(array), -1)
        if array.ndim > 2:
            raise InputError(
                f"The output '{name}' has the shape {list(array.shape)}, which is no column of a table. Write an .npz "
                "file."
            )
        if array.ndim == 1 or flat.shape[1] == 1:
            columns[name] = flat[:, 0]
            continue
        ends = classes if classes is not None and len(classes) == flat.shape[1] else range(flat.shape[1])
        columns |= {f"{name}_{end}": flat[:, index] for index, end in enumerate(ends)}
    frame = frame_library().DataFrame(columns)
    content = io.BytesIO()
    if output.suffix.lower() == ".csv":
        frame.to_csv(content, index=False)
    else:
        try:
            frame.to_parquet(content, index=False)
        except ImportError as error:
            raise InputError("Parquet files need pyarrow: pip install 'onnxtrain[data]'.") from error
    with replace_file(output) as file:
        file.write(content.getvalue())
