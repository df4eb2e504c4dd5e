"""Cuts an inference model out of the eval model and writes it with the trained parameters as initializers.

The code edits the protobuf message of the eval model byte by byte, with `onnx_wire`, because a device has no onnx.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from onnxtrain.errors import InputError, ModelError, ModelLoadError
from onnxtrain.runtime import dtypes
from onnxtrain.runtime import onnx_wire as wire
from onnxtrain.runtime.atomic import FileSet, external_data_name, finish_interrupted, replace_file
from onnxtrain.runtime.device import CPU
from onnxtrain.runtime.external_data import is_ort_format, locate, parse_reference
from onnxtrain.runtime.manifest import METADATA_KEY
from onnxtrain.runtime.onnx_wire import Bytes
from onnxtrain.runtime.session import ModelSource, describe, open_session
from onnxtrain.runtime.store import Buffer

# Field numbers of onnx.proto.
_MODEL_GRAPH, _MODEL_OPSET, _MODEL_METADATA, _MODEL_FUNCTION = 7, 8, 14, 25
_NODE, _INITIALIZER, _INPUT, _OUTPUT, _VALUE_INFO, _SPARSE_INITIALIZER = 1, 5, 11, 12, 13, 15
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_NAME, _TENSOR_RAW, _TENSOR_EXTERNAL, _TENSOR_LOCATION = 1, 2, 8, 9, 13, 14

MAX_FILE_SIZE = 2**31 - 2**20
"""Largest size of a model file in bytes: protobuf ends at 2 GiB. A larger model has its data in a file of its own."""
# Bytes; onnx recommends offsets at page borders, so that readers can map the file into memory.
_ALIGNMENT = 4096
# Number of names that an error message lists.
_SHOWN = 20


@dataclass
class _Node:
    """A NodeProto, with what pruning needs to know of it.

    Attributes:
        raw: all bytes of the field in the GraphProto.
        reads: names of the values that the node and its subgraphs read, e.g. {"x", "fc.weight"}.
        writes: names of its outputs, e.g. ["logits"]; "" for one that is left out.
        calls: (domain, op type) of the node and of the nodes in its subgraphs, e.g. {("", "Gemm")}.
    """

    raw: memoryview
    reads: set[str]
    writes: list[str]
    calls: set[tuple[str, str]]


@dataclass
class _Tensor:
    """An initializer: the bytes of its fields without the data, and the bytes of its data."""

    fields: bytes
    data: Bytes


@dataclass
class _Graph:
    """A GraphProto, taken apart: its nodes, per name its tensors and values, and in `rest` all other fields."""

    nodes: list[_Node] = field(default_factory=list)
    initializers: dict[str, memoryview] = field(default_factory=dict)
    sparse: dict[str, memoryview] = field(default_factory=dict)
    inputs: dict[str, memoryview] = field(default_factory=dict)
    outputs: dict[str, memoryview] = field(default_factory=dict)
    values: dict[str, memoryview] = field(default_factory=dict)
    rest: list[memoryview] = field(default_factory=list)


def _reads_and_calls(node: Bytes) -> tuple[set[str], set[tuple[str, str]]]:
    """Collects the names that a node and its subgraphs read, and the (domain, op type) pairs of their nodes."""
    # Names that a subgraph defines itself are in the result, too. They do no harm: ONNX forbids a subgraph to shadow an
    # outer name, so no outer value has such a name.
    reads, calls = set(wire.strings(node, 1)), {(wire.string(node, 7), wire.string(node, 4))}
    for attribute in wire.messages(node, 5):
        for subgraph in [*wire.messages(attribute, 6), *wire.messages(attribute, 11)]:
            reads |= {wire.string(output, 1) for output in wire.messages(subgraph, _OUTPUT)}
            for inner in wire.messages(subgraph, _NODE):
                inner_reads, inner_calls = _reads_and_calls(inner)
                reads |= inner_reads
                calls |= inner_calls
    return reads, calls


def _parse_graph(message: Bytes) -> _Graph:
    """Takes a GraphProto apart."""
    graph = _Graph()
    for part in wire.parse(message):
        if part.number == _NODE:
            reads, calls = _reads_and_calls(part.payload)
            graph.nodes.append(_Node(part.raw, reads, wire.strings(part.payload, 2), calls))
        elif part.number == _INITIALIZER:
            graph.initializers[wire.string(part.payload, _TENSOR_NAME)] = part.payload
        elif part.number == _SPARSE_INITIALIZER:
            # The name of a SparseTensorProto is the name of its values, a TensorProto.
            values = wire.messages(part.payload, 1)
            graph.sparse[wire.string(values[0], _TENSOR_NAME) if values else ""] = part.raw
        elif part.number in (_INPUT, _OUTPUT, _VALUE_INFO):
            group = {_INPUT: graph.inputs, _OUTPUT: graph.outputs, _VALUE_INFO: graph.values}[part.number]
            group[wire.string(part.payload, 1)] = part.payload
        else:
            graph.rest.append(part.raw)
    return graph


def _prune(graph: _Graph, outputs: Sequence[str]) -> set[str]:
    """Removes the nodes that `outputs` do not need, and sorts the others topologically.

    Returns:
        The names of all values that `outputs` need, themselves included.
    """
    # The walk follows producers and not the order of the nodes. ONNX Runtime loads nodes in any order, so a tool may
    # have moved them; a walk that counted on the order left nodes out.
    producers = {name: index for index, node in enumerate(graph.nodes) for name in node.writes if name}
    needed: set[str] = set()
    pending = list(outputs)
    kept: set[int] = set()
    while pending:
        name = pending.pop()
        needed.add(name)
        index = producers.get(name)
        if index is not None and index not in kept:
            kept.add(index)
            needed.update(graph.nodes[index].writes)
            pending += graph.nodes[index].reads - needed
    # Sorted, because the checker of onnx and other readers of the exported model take no other order.
    before = {
        index: {producers[name] for name in graph.nodes[index].reads if name in producers} - {index}
        for index in kept
    }
    graph.nodes = [graph.nodes[index] for index in _in_order(before)]
    return needed


def _in_order(before: Mapping[int, set[int]]) -> list[int]:
    """Sorts node indices topologically, and in ascending order where the topology leaves a choice.

    Args:
        before: per node index, the indices of the nodes that must come before it, e.g. {3: {0, 1}, 0: set(), 1: set()}.
    """
    # Kahn's algorithm with a heap, so that nodes which are in a valid order already stay as they are.
    waiting = {index: len(earlier) for index, earlier in before.items()}
    behind: dict[int, list[int]] = {index: [] for index in before}
    for index, earlier in before.items():
        for other in earlier:
            behind[other].append(index)
    ready = [index for index, count in waiting.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for other in behind[index]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, other)
    # In a valid model there is no cycle. If a subgraph shadows an outer name, the reads may form one; the order of the
    # file is then the best one known.
    return order if len(order) == len(before) else sorted(before)


def _parameter_tensor(name: str, buffer: Buffer) -> _Tensor:
    """Makes an initializer with the content of `buffer`."""
    # Bytes for every dtype: the length of the data is counted in bytes. bfloat16 is stored as its raw bits already.
    dims = b"".join(wire.integer(_TENSOR_DIMS, d) for d in buffer.shape)
    fields = dims + wire.integer(_TENSOR_TYPE, buffer.dtype.onnx) + wire.text(_TENSOR_NAME, name)
    return _Tensor(fields, buffer.read().reshape(-1).view(np.uint8).data)


def _embedded_tensor(tensor: Bytes, model: ModelSource) -> _Tensor:
    """Reads an initializer of the eval model; data in an external file is mapped into memory.

    Raises:
        ModelLoadError: the external file is missing, too short, or outside the directory of the model.
    """
    try:
        fields = list(wire.parse(tensor))
        data = parse_reference(tensor)
        if data is None:
            # Data in typed fields (float_data, ...) stays among the others. Of a field that occurs twice the last one
            # counts.
            raw = [f.payload for f in fields if f.number == _TENSOR_RAW]
            others = b"".join(f.raw for f in fields if f.number != _TENSOR_RAW)
            return _Tensor(others, raw[-1] if raw else b"")
        if isinstance(model, bytes):
            raise ValueError(
                f"it was given as bytes and refers to the external file '{data.location}'. Pass its path instead."
            )
        path = locate(data, Path(os.fspath(model)).parent)
    except ValueError as error:
        raise ModelLoadError(
            f"Exporting for inference: reading the {describe(model, 'eval model')}: {error}"
        ) from error
    others = b"".join(f.raw for f in fields if f.number not in (_TENSOR_EXTERNAL, _TENSOR_LOCATION))
    length = path.stat().st_size - data.offset if data.length is None else data.length
    # mmap refuses a length of 0.
    if length == 0:
        return _Tensor(others, b"")
    return _Tensor(others, np.memmap(path, np.uint8, "r", data.offset, (length,)).data)


def _value_info(name: str, ort_type: str, shape: Iterable[int | str | None] | None) -> bytes:
    """Makes the ValueInfoProto of an output from type and shape as onnxruntime reports them, e.g. "tensor(float)".

    `shape` is None if the rank is unknown. Raises InputError if the output is no tensor.
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
    model_parts: list[Bytes], graph: _Graph, constants: Sequence[_Tensor], names: Sequence[str]
) -> dict[str, bytes]:
    """Infers the ValueInfoProtos of the outputs `names` of a pruned graph by opening a session of it."""
    # onnxruntime reports a scalar and an unknown rank alike, as []. The length of the value's Shape, a further output,
    # tells them apart. Parameters are still graph inputs here, so the message is small.
    shapes = {name: f"{name}/shape" for name in names}
    untyped = {name: wire.text(1, name) for name in [*names, *shapes.values()]}
    parts = _graph_parts(graph, graph.inputs, untyped, set(graph.values) - set(names))
    parts += [
        wire.embed(_NODE, wire.text(1, name), wire.text(2, shape), wire.text(4, "Shape"))
        for name, shape in shapes.items()
    ]
    parts += _inline(constants)
    probe = b"".join([*model_parts, wire.embed(_MODEL_GRAPH, *parts)])
    session = open_session(probe, "the cut graph", CPU, None)
    reported = {o.name: o for o in session.get_outputs()}
    result = {}
    for name, shape in shapes.items():
        has_rank = isinstance(reported[shape].shape[0], int)
        result[name] = _value_info(name, reported[name].type, reported[name].shape if has_rank else None)
    return result


def _graph_parts(
    graph: _Graph, inputs: Mapping[str, Bytes], outputs: Mapping[str, Bytes], values: set[str]
) -> list[Bytes]:
    """Makes the fields of a GraphProto without dense initializers; value infos are kept of the names in `values`."""
    parts: list[Bytes] = [node.raw for node in graph.nodes]
    parts += graph.rest
    parts += graph.sparse.values()
    parts += [wire.embed(_INPUT, info) for info in inputs.values()]
    parts += [wire.embed(_OUTPUT, info) for info in outputs.values()]
    parts += [wire.embed(_VALUE_INFO, info) for name, info in graph.values.items() if name in values]
    return parts


def _model_parts(model: list[wire.Field], graph: _Graph) -> list[Bytes]:
    """Collects the fields of the new ModelProto except its graph.

    These are the fields of the eval model without the manifest, without functions that no remaining node calls, and
    without imports of domains that no remaining node uses.
    """
    functions = {
        (wire.string(f.payload, 10), wire.string(f.payload, 1)): f
        for f in model
        if f.number == _MODEL_FUNCTION
    }
    # Functions call functions: follow the calls from the nodes of the graph.
    pending = set().union(*(node.calls for node in graph.nodes)) if graph.nodes else set()
    called_functions: set[tuple[str, str]] = set()
    while pending:
        key = pending.pop()
        called_functions.add(key)
        if key in functions:
            for node in wire.messages(functions[key].payload, 7):
                pending |= _reads_and_calls(node)[1] - called_functions
    # The standard domain stays even if no node is left: onnx asks every model for it. It has two spellings.
    domains = {domain for domain, _ in called_functions} | {"", "ai.onnx"}
    parts: list[Bytes] = []
    for part in model:
        if part.number == _MODEL_GRAPH:
            continue
        # The exported model is no model of a training run: `Module` must not take it for one.
        if part.number == _MODEL_METADATA and wire.string(part.payload, 1) == METADATA_KEY:
            continue
        # A domain that nothing uses any more would only ask readers of the model for ops that they may not know.
        if part.number == _MODEL_OPSET and wire.string(part.payload, 1) not in domains:
            continue
        if part.number == _MODEL_FUNCTION:
            key = wire.string(part.payload, 10), wire.string(part.payload, 1)
            if key not in called_functions:
                continue
        parts.append(part.raw)
    return parts


def _inline(tensors: Sequence[_Tensor]) -> list[Bytes]:
    """Makes the initializer fields with the data inside, as chunks that share the memory of the tensors."""
    chunks: list[Bytes] = []
    # A chunk for the head and a chunk for the data: joined they would copy all weights.
    for tensor in tensors:
        raw = wire.header(_TENSOR_RAW, len(tensor.data)) if len(tensor.data) else b""
        length = len(tensor.fields) + len(raw) + len(tensor.data)
        chunks += [wire.header(_INITIALIZER, length) + tensor.fields + raw, tensor.data]
    return chunks


def _external(tensors: Sequence[_Tensor], files: FileSet, name: str) -> list[Bytes]:
    """Writes the data of the tensors to the file `name`, and makes the initializer fields that refer to it."""
    chunks: list[Bytes] = []
    with files.open(name) as file:
        for tensor in tensors:
            if not len(tensor.data):
                chunks.append(wire.embed(_INITIALIZER, tensor.fields))
                continue
            file.write(bytes(-file.tell() % _ALIGNMENT))
            entries = {
                "location": name,
                "offset": str(file.tell()),
                "length": str(len(tensor.data)),
            }
            file.write(tensor.data)
            reference = b"".join(
                wire.embed(_TENSOR_EXTERNAL, wire.text(1, key), wire.text(2, value))
                for key, value in entries.items()
            )
            chunks.append(
                wire.embed(_INITIALIZER, tensor.fields, reference, wire.integer(_TENSOR_LOCATION, 1))
            )
    return chunks


def _check_names(graph: _Graph, names: Sequence[str]) -> None:
    """Raises InputError unless all names are different values that a node computes."""
    # Inputs and parameters are no candidates: a model that returns them computes nothing.
    computed = [name for node in graph.nodes for name in node.writes if name]
    unknown = [name for name in names if name not in computed]
    if not names or unknown or len(set(names)) != len(names):
        # From the end of the graph: predictions are near the loss.
        candidates = [*graph.outputs, *(n for n in reversed(computed) if n not in graph.outputs)]
        problem = (
            f"unknown names {unknown}" if unknown else f"expected distinct names, received {list(names)}"
        )
        raise InputError(
            f"Exporting for inference: {problem}. The eval model computes: {', '.join(candidates[:_SHOWN])}"
            f"{', ...' if len(candidates) > _SHOWN else ''}."
        )


def export_inference_model(
    eval_model: ModelSource,
    parameters: Mapping[str, Buffer],
    uri: str | os.PathLike[str],
    output_names: Sequence[str],
) -> None:
    """Writes the part of the eval model that computes `output_names`, with the parameters as initializers.

    Args:
        eval_model: path or bytes of the eval model; its parameters and statistics are graph inputs.
        parameters: per name, the value of a parameter or statistic.
        uri: path of the model file to write. A killed process leaves the old file or the new one.
        output_names: names of the outputs, in order, e.g. ["logits"].

    Raises:
        InputError: a name is not computed by the eval model.
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
            raise ValueError("it is in ORT format; make the Module with the .onnx file of the eval model")
        model = list(wire.parse(content))
        graph = _parse_graph(next(f.payload for f in model if f.number == _MODEL_GRAPH))
    except (OSError, ValueError, StopIteration) as error:
        raise ModelLoadError(f"Exporting for inference: reading the {source} failed: {error}.") from error
    if isinstance(output_names, str):
        raise InputError(
            f"Exporting for inference: expected a list of names, received the str '{output_names}'."
        )
    _check_names(graph, output_names)
    needed = _prune(graph, output_names)
    for group in (graph.initializers, graph.sparse, graph.inputs):
        for name in [n for n in group if n not in needed]:
            del group[name]
    try:
        model_parts = _model_parts(model, graph)
    # Names of functions and domains are read only here, and in a damaged file they may be no UTF-8.
    except ValueError as error:
        raise ModelLoadError(f"Exporting for inference: reading the {source} failed: {error}.") from error
    tensors = [_embedded_tensor(t, eval_model) for t in graph.initializers.values()]
    output_infos: dict[str, Bytes] = {
        n: v for n, v in {**graph.values, **graph.outputs}.items() if n in output_names
    }
    # A session costs time, so one is opened only if the eval model does not declare all outputs.
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
        raise ModelError(
            f"Exporting for inference: writing '{os.fspath(uri)}' failed: {error.strerror or error}. A file "
            "that was there before is unchanged; check that the directory exists, is writable and has room."
        ) from error


def _write(
    model: Sequence[Bytes], graph: Sequence[Bytes], tensors: Sequence[_Tensor], path: str, large: bool
) -> None:
    """Writes a model with the given fields to `path`; if it is large, the tensors' data goes to a file of its own."""

    def write(file: BinaryIO, initializers: list[Bytes]) -> None:
        fields = [*graph, *initializers]
        for chunk in [*model, wire.header(_MODEL_GRAPH, wire.total(fields)), *fields]:
            file.write(chunk)

    if not large:
        with replace_file(path) as file:
            write(file, _inline(tensors))
        return
    # If `path` is a symbolic link, the model replaces the link: behind it the model would lie in another directory than
    # its data.
    directory, name = os.path.split(os.path.abspath(path))
    with FileSet(directory) as files:
        initializers = _external(tensors, files, external_data_name(name))
        with files.open(name) as file:
            write(file, initializers)
