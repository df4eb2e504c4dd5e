"""Write a model: in one file where protobuf can, else with its weights beside it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import onnx
import onnx_ir as ir

from onnxtrain.errors import ModelError

__all__ = ["DEFAULT_EXTERNAL_DATA_THRESHOLD", "save_model", "to_proto"]

DEFAULT_EXTERNAL_DATA_THRESHOLD = 1_500_000_000
"""Bytes of initializers beyond which weights go to a file of their own; protobuf stops at 2 GiB."""

# Shapes, axes and the like stay in the model file: runtimes and converters look at their values.
_EXTERNAL_TENSOR_BYTES = 1024


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Return `model` as a self-contained proto; external data is read into it.

    Raises:
        ModelError: The initializers are too big for one proto; use :func:`save_model`.
    """
    size = _initializer_bytes(model)
    if size > DEFAULT_EXTERNAL_DATA_THRESHOLD:
        raise ModelError(
            f"Cannot make one proto of a model with {size / 1e9:.1f} GB of initializers (protobuf holds 2). "
            "Write it with save_model, which puts them in a file of their own."
        )
    return ir.to_proto(_with_tensors_in_memory(model))


def save_model(
    model: ir.Model,
    path: str | os.PathLike[str],
    external_data_threshold: int = DEFAULT_EXTERNAL_DATA_THRESHOLD,
) -> None:
    """Write `model` to `path`, atomically; `model` stays usable and is not changed.

    Args:
        model: Any model; tensors on disk are copied without being read into memory as a whole.
        path: The file to write. Its directory must exist.
        external_data_threshold: If the initializers have more bytes than this in all, those over 1 kB go to
            `<path>.data`. Each file is replaced atomically, the data first.
    """
    path = Path(path)
    data = path.with_name(path.name + ".data")
    _map_tensors_of(model, data)
    workspace = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.absolute().parent))
    try:
        if _initializer_bytes(model) > external_data_threshold:
            ir.save(
                model,
                workspace / path.name,
                format="protobuf",
                external_data=data.name,
                size_threshold_bytes=_EXTERNAL_TENSOR_BYTES,
            )
            _replace(workspace / data.name, data)
        else:
            ir.save(_with_tensors_in_memory(model), workspace / path.name, format="protobuf")
        _replace(workspace / path.name, path)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _initializer_bytes(model: ir.Model) -> int:
    return sum(
        value.const_value.nbytes
        for graph in model.graphs()
        for value in graph.initializers.values()
        if value.const_value is not None
    )


def _with_tensors_in_memory(model: ir.Model) -> ir.Model:
    """Return a clone of `model` whose initializers are all serialised with it."""
    clone = model.clone()
    for graph in clone.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)
    return clone


def _map_tensors_of(model: ir.Model, data: Path) -> None:
    """Map tensors stored in `data` now: a mapping outlives the replacement of the file, a path would not."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and Path(tensor.path).resolve() == data.resolve():
                tensor.numpy()


def _replace(source: Path, target: Path) -> None:
    """Move `source` onto `target` so that after a crash either the old or the new file is there, complete."""
    with source.open("rb") as file:
        os.fsync(file.fileno())
    source.replace(target)
    if os.name == "posix":  # other systems cannot open a directory
        directory = os.open(target.absolute().parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
