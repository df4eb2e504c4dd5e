"""Writes a model to one file, or with a second file for its weights if protobuf cannot hold them."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Concatenate, ParamSpec, Protocol, cast, overload

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import ModelError
from onnxtrain.passes.io.load import ModelSource
from onnxtrain.passes.io.without_weights import has_unnamed_values
from onnxtrain.runtime.atomic import FileSet, external_data_name, is_stream, replace_file

DEFAULT_EXTERNAL_DATA_THRESHOLD = 1_500_000_000
"""Total bytes of initializers above which weights are written to a second file. protobuf's limit is 2 GiB."""

DEFAULT_SHARED_DATA_THRESHOLD = 16_000_000
"""Total bytes of weights common to several models of a run above which these are written to a shared file."""

# Smaller tensors remain in the model file, because runtimes and converters read the values of shapes and axes.
EXTERNAL_TENSOR_BYTES = 1024
# onnx recommends page-aligned offsets, so that readers can memory-map tensors.
_ALIGNMENT = 4096


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Returns `model` as a single proto that includes its external data.

    Raises:
        ModelError: the initializers are too large for one proto; use :func:`save_model`.
    """
    size = _initializer_bytes(model)
    if size > DEFAULT_EXTERNAL_DATA_THRESHOLD:
        raise ModelError(
            f"Cannot serialize a model with {size / 1e9:.1f} GB of initializers as one protobuf message, "
            "whose limit is 2 GB. Use save_model, which writes the initializers to a separate file."
        )
    return ir.to_proto(_with_tensors_in_memory(model))


def as_given(result: ir.Model, given: ModelSource) -> onnx.ModelProto | ir.Model:
    """Returns a result as an IR model if the caller passed one, otherwise as a `ModelProto`.

    Args:
        result: the model to return.
        given: the model that the caller passed.

    Raises:
        ModelError: the initializers are too large for one proto.
    """
    if isinstance(given, ir.Model):
        return result
    try:
        return to_proto(result)
    except ModelError as error:
        raise ModelError(
            f"{error} Or pass onnx_ir.load(path) instead of the path: the result is then an onnx_ir.Model, "
            "which onnx_ir.save can write and Trainer accepts."
        ) from error


_P = ParamSpec("_P")


class _SameKind(Protocol[_P]):
    """Type of a function that returns an `ir.Model` for an `ir.Model`, and a `ModelProto` for any other source."""

    @overload
    def __call__(self, model: ir.Model, *args: _P.args, **kwargs: _P.kwargs) -> ir.Model: ...
    @overload
    def __call__(
        self, model: str | os.PathLike[str] | onnx.ModelProto, *args: _P.args, **kwargs: _P.kwargs
    ) -> onnx.ModelProto: ...


def same_kind(
    function: Callable[Concatenate[ModelSource, _P], onnx.ModelProto | ir.Model],
) -> _SameKind[_P]:
    """Decorator for type checkers: the function returns an IR model for an IR model, and a `ModelProto` otherwise.

    The function must return the result of :func:`as_given`. The decorator doesn't change the function.
    """
    return cast("_SameKind[_P]", function)


def save_model(
    model: ir.Model,
    path: str | os.PathLike[str],
    external_data_threshold: int = DEFAULT_EXTERNAL_DATA_THRESHOLD,
) -> None:
    """Writes `model` to `path` atomically; `model` remains usable and is not modified.

    Args:
        model: any model. External tensors that are written to a data file are copied in chunks, not loaded.
        path: the file to write, in an existing directory.
        external_data_threshold: total size of the initializers, in bytes, above which a second file is written,
            `<path>.<12 hexadecimal digits>.data`. It contains the initializers that are larger than 1 kB.
            Each call writes a new data file, so that the model at `path` is always complete; the data file of a
            replaced model is removed. If `path` is a device or pipe, such as /dev/stdout, the model is written as one
            file.
    """
    path = Path(path)
    if is_stream(path):
        # A device or pipe has no folder for a data file.
        content = ir.to_proto(_with_tensors_in_memory(model)).SerializeToString()
        with replace_file(path) as file:
            file.write(content)
        return
    with FileSet(path.absolute().parent) as files:
        write_model(model, files, path.name, external_data_threshold)


def write_models(
    models: Mapping[str, ir.Model],
    files: FileSet,
    shared_data_threshold: int = DEFAULT_SHARED_DATA_THRESHOLD,
    *,
    placed: Mapping[int, ir.ExternalTensor] = MappingProxyType({}),
) -> dict[str, list[str]]:
    """Writes models to a set of files that are published together. Large weights that models share are written once.

    Args:
        models: models by file name, e.g. {"training_model.onnx": model}.
        files: set of files.
        shared_data_threshold: total size in bytes above which shared initializers are written to one file, to which
            the models refer. Only initializers larger than 1 kB count and are shared. The file is named after the first
            model, see :func:`save_model`.
        placed: initializers that are already in a data file; see :func:`write_model`.

    Returns:
        Names of the data files of each model that has any, e.g. {"training_model.onnx": [...]}.
    """
    for name, model in models.items():
        _map_tensors_beside(model, name)
    # Passes that copy a model don't copy tensors, so equal weights of the models have one storage.
    tensors: dict[Hashable, dict[int, ir.TensorProtocol]] = {}
    readers: Counter[Hashable] = Counter()
    for model in models.values():
        for tensor in tensors_of(model):
            if id(tensor) in placed:
                continue
            if tensor.nbytes > EXTERNAL_TENSOR_BYTES and tensor.dtype != ir.DataType.STRING:
                tensors.setdefault(storage_of(tensor), {})[id(tensor)] = tensor
                readers[storage_of(tensor)] += 1
    # Two initializers of one model count like initializers of two models.
    shared = {storage: views for storage, views in tensors.items() if readers[storage] > 1}
    places = dict(placed)
    if sum(next(iter(views.values())).nbytes for views in shared.values()) > shared_data_threshold:
        data = external_data_name(next(iter(models)))
        with files.open(data) as file:
            for views in shared.values():
                place = _append_to_file(next(iter(views.values())), file, data)
                places |= {key: with_type_of(place, tensor) for key, tensor in views.items()}
    data_files: dict[str, list[str]] = {}
    for name, model in models.items():
        own = write_model(model, files, name, placed=places)
        shared_files = {places[id(t)].location for t in tensors_of(model) if id(t) in places}
        data_files[name] = sorted({*map(str, shared_files), *([own] if own else [])})
    return {name: names for name, names in data_files.items() if names}


def write_model(
    model: ir.Model,
    files: FileSet,
    name: str,
    external_data_threshold: int = DEFAULT_EXTERNAL_DATA_THRESHOLD,
    *,
    placed: Mapping[int, ir.ExternalTensor] = MappingProxyType({}),
) -> str | None:
    """Writes `model` to the file `name` in a set of files that are published together; see :func:`save_model`.

    Args:
        model: the model.
        files: set of files.
        name: name of the file, e.g. "net.onnx".
        external_data_threshold: see :func:`save_model`.
        placed: initializers that are already in a data file: maps the `id` of the model's tensor to the external
            tensor that replaces it.

    Returns:
        The name of the data file; None if none was written.
    """
    data = None
    # The model may have been loaded from the file that is replaced, whose data file will be removed.
    _map_tensors_beside(model, name)
    if sum(t.nbytes for t in tensors_of(model) if id(t) not in placed) > external_data_threshold:
        data = external_data_name(name)
        with files.open(data) as file:
            model = _with_tensors_in(model, file, data, placed)
    else:
        model = _with_tensors_in_memory(model, placed)
    with files.open(name) as file:
        file.write(ir.to_proto(model).SerializeToString())
    return data


def tensors_of(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """Yields the tensors of all initializers."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.const_value


def _initializer_bytes(model: ir.Model) -> int:
    """Returns the size of all initializers in bytes."""
    return sum(tensor.nbytes for tensor in tensors_of(model))


def _with_tensors_in_memory(
    model: ir.Model, placed: Mapping[int, ir.ExternalTensor] = MappingProxyType({})
) -> ir.Model:
    """Returns a model like `model` that refers to no files except those of `placed`; `model` itself if it is one.

    Args:
        model: the model.
        placed: see :func:`_clone`.
    """
    external = any(
        id(tensor) in placed or isinstance(tensor, ir.ExternalTensor) for tensor in tensors_of(model)
    )
    # Cloning names unnamed values.
    return _clone(model, math.inf, placed) if external or has_unnamed_values(model) else model


def _clone(model: ir.Model, limit: float, placed: Mapping[int, ir.ExternalTensor]) -> ir.Model:
    """Returns a clone of `model` with its small external initializers loaded into memory.

    Args:
        model: the model.
        limit: maximum size of a loaded tensor in bytes. Larger tensors remain external.
        placed: tensors that are already in a data file, by the `id` of the tensors that they replace. They remain
            external.
    """
    clone = model.clone()
    for graph in clone.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if id(tensor) in placed:
                value.const_value = placed[id(tensor)]
            elif isinstance(tensor, ir.ExternalTensor) and tensor.nbytes <= limit:
                value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)
    return clone


def _with_tensors_in(
    model: ir.Model, file: BinaryIO, name: str, placed: Mapping[int, ir.ExternalTensor]
) -> ir.Model:
    """Writes large initializers to a data file, and returns a clone of `model` that refers to the file.

    Args:
        model: the model.
        file: the open data file.
        name: name of the data file.
        placed: tensors that are already in a different data file, by the `id` of the tensors that they replace.
    """
    clone = _clone(model, EXTERNAL_TENSOR_BYTES, placed)
    there = set(map(id, placed.values()))
    for graph in clone.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            # ONNX cannot store strings as external data.
            if (
                tensor is None
                or id(tensor) in there
                or tensor.dtype == ir.DataType.STRING
                or tensor.nbytes <= EXTERNAL_TENSOR_BYTES
            ):
                continue
            value.const_value = _append_to_file(tensor, file, name)
    return clone


def storage_of(tensor: ir.TensorProtocol) -> Hashable:
    """Returns a key that is equal for tensors that occupy the same bytes, in memory or in a file."""
    if isinstance(tensor, ir.ExternalTensor):
        return str(tensor.path), tensor.offset, tensor.length
    # Views of one array, e.g. the bytes of int4 weights as MatMulNBits and as DequantizeLinear reads them.
    array = getattr(tensor, "raw", None)
    if isinstance(array, np.ndarray) and array.flags.c_contiguous:
        return array.__array_interface__["data"][0], array.nbytes
    return id(tensor)


def with_type_of(place: ir.ExternalTensor, tensor: ir.TensorProtocol) -> ir.ExternalTensor:
    """Returns an external tensor at `place` with the dtype, shape and name of `tensor`."""
    shape = ir.Shape(tensor.shape.numpy())
    name = str(tensor.name)
    return ir.ExternalTensor(place.location, place.offset, place.length, tensor.dtype, shape=shape, name=name)


def _append_to_file(tensor: ir.TensorProtocol, file: BinaryIO, name: str) -> ir.ExternalTensor:
    """Appends the data of a tensor to the open file `name`, and returns an external tensor that refers to it."""
    # Padding to the next page.
    file.write(bytes(-file.tell() % _ALIGNMENT))
    offset = file.tell()
    _write_data(tensor, file)
    shape = ir.Shape(tensor.shape.numpy())
    return ir.ExternalTensor(
        name, offset, file.tell() - offset, tensor.dtype, shape=shape, name=str(tensor.name)
    )


def _write_data(tensor: ir.TensorProtocol, file: BinaryIO) -> None:
    """Writes the bytes of a tensor to a file."""
    # Most tensors of onnx_ir can write themselves without a copy in memory, but the protocol doesn't require it.
    write = getattr(tensor, "tofile", None)
    if write is None:
        file.write(tensor.tobytes())
    else:
        write(file)


def _map_tensors_beside(model: ir.Model, name: str) -> None:
    """Memory-maps the tensors in data files `<name>.*`, before saving the model as `name` removes these files.

    A mapping outlives the removal of its file.
    """
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and Path(tensor.path).name.startswith(f"{name}."):
                tensor.numpy()
