"""Cuts an inference model out of the eval model, and writes it with the trained parameters as initializers.

The protobuf message of the eval model is edited with `onnx_wire`, because a device has no onnx.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from onnxtrain.errors import InputError, ModelError, ModelLoadError
from onnxtrain.runtime import dtypes
from onnxtrain.runtime import onnx_proto as proto
from onnxtrain.runtime import onnx_wire as wire
from onnxtrain.runtime.atomic import (
    FileSet,
    external_data_name,
    finish_interrupted,
    is_stream,
    replace_file,
)
from onnxtrain.runtime.device import CPU
from onnxtrain.runtime.external_data import is_ort_format, locate, parse_reference
from onnxtrain.runtime.manifest import METADATA_KEY
from onnxtrain.runtime.onnx_graph import Graph, parse_graph, prune, reads_and_calls
from onnxtrain.runtime.onnx_wire import Bytes
from onnxtrain.runtime.session import ModelSource, describe, open_session
from onnxtrain.runtime.store import Buffer

MAX_FILE_SIZE = 2**31 - 2**20
"""Maximum size of a model file in bytes: protobuf's limit is 2 GiB. The data of larger models is in a second file."""
# In bytes; onnx recommends page-aligned offsets, so that readers can memory-map the file.
_ALIGNMENT = 4096
# Maximum number of names in an error message.
_SHOWN = 20


@dataclass
class _Tensor:
    """An initializer, split into two parts of its TensorProto, so that the data need not be copied.

    Attributes:
        fields: bytes of all fields except the data.
        data: bytes of the data.
    """

    fields: bytes
    data: Bytes


def _parameter_tensor(name: str, buffer: Buffer) -> _Tensor:
    """Returns an initializer with the content of `buffer`."""
    # As bytes, because the length of the data is in bytes. bfloat16 is already stored as raw bits.
    dims = b"".join(wire.integer(proto.TENSOR_DIMS, d) for d in buffer.shape)
    fields = dims + wire.integer(proto.TENSOR_TYPE, buffer.dtype.onnx) + wire.text(proto.TENSOR_NAME, name)
    return _Tensor(fields, buffer.read().reshape(-1).view(np.uint8).data)


def _embedded_tensor(tensor: Bytes, model: ModelSource) -> _Tensor:
    """Reads an initializer of the eval model; external data is memory-mapped.

    Args:
        tensor: the TensorProto.
        model: path or bytes of the eval model.

    Raises:
        ModelLoadError: the external file is missing, too short, or outside the model's directory.
    """
    try:
        fields = list(wire.parse(tensor))
        data = parse_reference(tensor)
        if data is None:
            # Data in typed fields (float_data, ...) is part of the other fields. If a field occurs twice, the last one
            # counts.
            raw = [f.payload for f in fields if f.number == proto.TENSOR_RAW]
            others = b"".join(f.raw for f in fields if f.number != proto.TENSOR_RAW)
            return _Tensor(others, raw[-1] if raw else b"")
        if isinstance(model, bytes):
            raise ValueError(
                f"it was passed as bytes but refers to the external file '{data.location}'. Pass its path "
                "instead."
            )
        path = locate(data, Path(os.fspath(model)).parent)
    except ValueError as error:
        raise ModelLoadError(
            f"Exporting for inference: reading the {describe(model, 'eval model')}: {error}"
        ) from error
    others = b"".join(f.raw for f in fields if f.number not in (proto.TENSOR_EXTERNAL, proto.TENSOR_LOCATION))
    length = path.stat().st_size - data.offset if data.length is None else data.length
    # mmap does not accept a length of 0.
    if length == 0:
        return _Tensor(others, b"")
    return _Tensor(others, np.memmap(path, np.uint8, "r", data.offset, (length,)).data)


def _value_info(name: str, ort_type: str, shape: Iterable[int | str | None] | None) -> bytes:
    """Encodes the ValueInfoProto of an output.

    Args:
        name: name of the output.
        ort_type: type as reported by onnxruntime, e.g. "tensor(float)".
        shape: sizes, e.g. ("batch", 4); None if the rank is unknown.

    Raises:
        InputError: the output is not a tensor.
    """
    dtype = dtypes.BY_ORT.get(ort_type)
    if dtype is None:
        raise InputError(
            f"Exporting for inference: output '{name}' is a {ort_type}; only tensors can be exported."
        )
    tensor_type = wire.integer(1, dtype.onnx)
    if shape is not None:
        sizes = [wire.integer(1, d) if isinstance(d, int) else wire.text(2, d) if d else b"" for d in shape]
        tensor_type += wire.embed(2, *(wire.embed(1, size) for size in sizes))
    return wire.text(1, name) + wire.embed(2, wire.embed(1, tensor_type))


def _infer_outputs(
    model_parts: list[Bytes], graph: Graph, constants: Sequence[_Tensor], names: Sequence[str]
) -> dict[str, bytes]:
    """Returns the ValueInfoProtos that ONNX Runtime infers for the outputs of a pruned graph, by output name.

    Args:
        model_parts: encoded fields of the ModelProto except the graph.
        graph: the pruned graph.
        constants: initializers of the graph.
        names: names of the outputs, e.g. ["logits"].
    """
    # onnxruntime reports [] for both a scalar and an unknown rank. An additional output, the value's Shape,
    # distinguishes them by its length. Parameters are still graph inputs here, so the message is small.
    shapes = {name: f"{name}/shape" for name in names}
    untyped = {name: wire.text(1, name) for name in [*names, *shapes.values()]}
    parts = _graph_parts(graph, graph.inputs, untyped, set(graph.values) - set(names))
    parts += [
        wire.embed(
            proto.GRAPH_NODE,
            wire.text(proto.NODE_INPUT, name),
            wire.text(proto.NODE_OUTPUT, shape),
            wire.text(proto.NODE_OP_TYPE, "Shape"),
        )
        for name, shape in shapes.items()
    ]
    parts += _inline(constants)
    probe = b"".join([*model_parts, wire.embed(proto.MODEL_GRAPH, *parts)])
    session = open_session(probe, "the cut graph", CPU, None)
    reported = {o.name: o for o in session.get_outputs()}
    result = {}
    for name, shape in shapes.items():
        has_rank = isinstance(reported[shape].shape[0], int)
        result[name] = _value_info(name, reported[name].type, reported[name].shape if has_rank else None)
    return result


def _graph_parts(
    graph: Graph, inputs: Mapping[str, Bytes], outputs: Mapping[str, Bytes], values: set[str]
) -> list[Bytes]:
    """Returns the encoded fields of a GraphProto, except its dense initializers.

    Args:
        graph: the graph from which nodes, sparse initializers and other fields are taken.
        inputs: ValueInfoProtos of the inputs by name.
        outputs: ValueInfoProtos of the outputs by name.
        values: names of the intermediate values whose ValueInfoProtos are kept.
    """
    parts: list[Bytes] = [node.raw for node in graph.nodes]
    parts += graph.rest
    parts += graph.sparse.values()
    parts += [wire.embed(proto.GRAPH_INPUT, info) for info in inputs.values()]
    parts += [wire.embed(proto.GRAPH_OUTPUT, info) for info in outputs.values()]
    parts += [wire.embed(proto.GRAPH_VALUE, info) for name, info in graph.values.items() if name in values]
    return parts


def _function_name(function: Bytes) -> tuple[str, str]:
    """Returns the domain and name of a function, e.g. ("onnxtrain", "GeluGradient_float")."""
    return wire.string(function, proto.FUNCTION_DOMAIN), wire.string(function, proto.FUNCTION_NAME)


def _model_parts(model: list[wire.Field], graph: Graph, metadata: Mapping[str, str]) -> list[Bytes]:
    """Returns the encoded fields of the exported ModelProto, except its graph.

    These are the fields of the eval model, except the manifest, functions that `graph` does not call, and opset imports
    of domains that are no longer used.

    Args:
        model: fields of the eval model.
        graph: the pruned graph.
        metadata: entries to add to the metadata.
    """
    functions = {_function_name(f.payload): f for f in model if f.number == proto.MODEL_FUNCTION}
    # Functions may call functions, so calls are followed from the nodes of the graph.
    pending = set().union(*(node.calls for node in graph.nodes)) if graph.nodes else set()
    called_functions: set[tuple[str, str]] = set()
    while pending:
        key = pending.pop()
        called_functions.add(key)
        if key in functions:
            for node in wire.messages(functions[key].payload, proto.FUNCTION_NODE):
                pending |= reads_and_calls(node)[1] - called_functions
    # The standard domain, which has two names, is kept even if no node is left, because onnx requires every model to
    # import it.
    domains = {domain for domain, _ in called_functions} | {"", "ai.onnx"}
    parts: list[Bytes] = []
    for part in model:
        if part.number == proto.MODEL_GRAPH:
            continue
        # The exported model does not belong to a training run, and `Module` must reject it.
        if part.number == proto.MODEL_METADATA and wire.string(part.payload, 1) in {METADATA_KEY, *metadata}:
            continue
        # An unused domain would only require readers of the model to know its ops.
        if part.number == proto.MODEL_OPSET and wire.string(part.payload, 1) not in domains:
            continue
        if part.number == proto.MODEL_FUNCTION and _function_name(part.payload) not in called_functions:
            continue
        parts.append(part.raw)
    parts += [
        wire.embed(proto.MODEL_METADATA, wire.text(1, key), wire.text(2, value))
        for key, value in metadata.items()
    ]
    return parts


def _inline(tensors: Sequence[_Tensor]) -> list[Bytes]:
    """Encodes tensors as initializer fields that contain their data, in chunks that share the tensors' memory."""
    chunks: list[Bytes] = []
    # Separate chunks for header and data, because joining them would copy all weights.
    for tensor in tensors:
        raw = wire.header(proto.TENSOR_RAW, len(tensor.data)) if len(tensor.data) else b""
        length = len(tensor.fields) + len(raw) + len(tensor.data)
        chunks += [wire.header(proto.GRAPH_INITIALIZER, length) + tensor.fields + raw, tensor.data]
    return chunks


def _external(tensors: Sequence[_Tensor], files: FileSet, name: str) -> list[Bytes]:
    """Writes the tensors' data to the file `name`, and returns encoded initializer fields that refer to it."""
    chunks: list[Bytes] = []
    with files.open(name) as file:
        for tensor in tensors:
            if not len(tensor.data):
                chunks.append(wire.embed(proto.GRAPH_INITIALIZER, tensor.fields))
                continue
            file.write(bytes(-file.tell() % _ALIGNMENT))
            entries = {
                "location": name,
                "offset": str(file.tell()),
                "length": str(len(tensor.data)),
            }
            file.write(tensor.data)
            reference = b"".join(
                wire.embed(proto.TENSOR_EXTERNAL, wire.text(1, key), wire.text(2, value))
                for key, value in entries.items()
            )
            chunks.append(
                wire.embed(
                    proto.GRAPH_INITIALIZER, tensor.fields, reference, wire.integer(proto.TENSOR_LOCATION, 1)
                )
            )
    return chunks


def _check_names(graph: Graph, names: Sequence[str]) -> None:
    """Raises InputError unless `names` are distinct values of the graph, and a node computes at least one of them."""
    computed = [name for node in graph.nodes for name in node.writes if name]
    # A model may return inputs and parameters in addition to computed values.
    unknown = [name for name in names if name not in {*computed, *graph.inputs, *graph.initializers}]
    if unknown:
        problem = f"unknown names {unknown}"
    elif not names or len(set(names)) != len(names):
        problem = f"expected distinct names, received {list(names)}"
    elif not set(names) & set(computed):
        problem = f"{list(names)} are inputs or parameters, so the model would compute nothing"
    else:
        return
    # From the end of the graph, because predictions are near the loss.
    candidates = [*graph.outputs, *(n for n in reversed(computed) if n not in graph.outputs)]
    raise InputError(
        f"Exporting for inference: {problem}. The eval model computes: "
        f"{', '.join(candidates[:_SHOWN])}{', ...' if len(candidates) > _SHOWN else ''}. To export other "
        "values, name them in additional_output_names of generate_artifacts."
    )


def export_inference_model(
    eval_model: ModelSource,
    parameters: Mapping[str, Buffer],
    uri: str | os.PathLike[str],
    output_names: Sequence[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Exports the part of the eval model that computes `output_names`, with the parameters as initializers.

    Args:
        eval_model: path or bytes of the eval model; its parameters and statistics are graph inputs.
        parameters: values of the parameters and statistics by name.
        uri: path of the model file, which is replaced atomically. If the model exceeds 2 GB, a second file in the same
            directory contains the data of its tensors.
        output_names: names of the outputs, in order, e.g. ["logits"].
        metadata: entries to add to the model's metadata, by key; they replace entries of the eval model.

    Raises:
        InputError: `output_names` is empty, contains a name twice, contains a name that is not a value of the eval
            model, or contains only inputs and parameters.
        ModelLoadError: the eval model cannot be read.
        ModelError: the file cannot be written.
    """
    source = describe(eval_model, "eval model")
    try:
        if isinstance(eval_model, bytes):
            content = eval_model
        else:
            finish_interrupted(eval_model)
            content = Path(os.fspath(eval_model)).read_bytes()
        if is_ort_format(content):
            raise ValueError("it is in ORT format; create the Module with the .onnx file of the eval model")
        model = list(wire.parse(content))
        graph = parse_graph(next(f.payload for f in model if f.number == proto.MODEL_GRAPH))
    except (OSError, ValueError, StopIteration) as error:
        raise ModelLoadError(f"Exporting for inference: reading the {source} failed: {error}.") from error
    if isinstance(output_names, str):
        raise InputError(
            f"Exporting for inference: expected a list of names, received the str '{output_names}'."
        )
    _check_names(graph, output_names)
    needed = prune(graph, output_names)
    for group in (graph.initializers, graph.sparse, graph.inputs):
        for name in [n for n in group if n not in needed]:
            del group[name]
    try:
        model_parts = _model_parts(model, graph, metadata or {})
    # Names of functions and domains are only read here; in a damaged file they may not be UTF-8.
    except ValueError as error:
        raise ModelLoadError(f"Exporting for inference: reading the {source} failed: {error}.") from error
    tensors = [_embedded_tensor(t, eval_model) for t in graph.initializers.values()]
    output_infos: dict[str, Bytes] = {
        n: v for n, v in {**graph.values, **graph.inputs, **graph.outputs}.items() if n in output_names
    }
    # Opening a session takes time, so it is only done if the eval model does not declare all outputs.
    if len(output_infos) < len(output_names):
        output_infos.update(_infer_outputs(model_parts, graph, tensors, output_names))
    tensors += [_parameter_tensor(n, b) for n, b in parameters.items() if n in needed]
    parts = _graph_parts(
        graph,
        {n: v for n, v in graph.inputs.items() if n not in parameters},
        {n: output_infos[n] for n in output_names},
        needed - set(output_names),
    )
    large = wire.total(parts) + sum(len(t.data) for t in tensors) > MAX_FILE_SIZE
    try:
        _write(model_parts, parts, tensors, os.fspath(uri), large)
    except OSError as error:
        raise write_error(uri, error) from error


def write_error(path: str | os.PathLike[str], error: OSError) -> ModelError:
    """Returns the error to raise if an exported model cannot be written."""
    return ModelError(
        f"Exporting for inference: writing '{os.fspath(path)}' failed: {error.strerror or error}. An existing file is "
        "unchanged; check that the directory exists, is writable and has free space."
    )


def _write(
    model: Sequence[Bytes], graph: Sequence[Bytes], tensors: Sequence[_Tensor], path: str, large: bool
) -> None:
    """Writes an exported model.

    Args:
        model: encoded fields of the ModelProto except its graph.
        graph: encoded fields of the GraphProto except its dense initializers.
        tensors: the dense initializers.
        path: path of the file.
        large: True to write the tensors' data to a second file.
    """

    def write(file: BinaryIO, initializers: list[Bytes]) -> None:
        fields = [*graph, *initializers]
        for chunk in [*model, wire.header(proto.MODEL_GRAPH, wire.total(fields)), *fields]:
            file.write(chunk)

    if large and is_stream(path):
        raise OSError(errno.EFBIG, "a model larger than 2 GB needs an external data file")
    if not large:
        with replace_file(path) as file:
            write(file, _inline(tensors))
        return
    # A symbolic link `path` is replaced, because its target would be in another directory than the data.
    directory, name = os.path.split(os.path.abspath(path))
    with FileSet(directory) as files:
        initializers = _external(tensors, files, external_data_name(name))
        with files.open(name) as file:
            write(file, initializers)
