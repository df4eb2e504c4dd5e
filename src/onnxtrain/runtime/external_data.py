"""Checks that the external data of a model is complete and in the model's directory.

A model with external data contains the paths of the files that ONNX Runtime reads its weights from. Some versions of
ONNX Runtime open files outside the model's directory (1.20), and some read beyond the end of a file. So all tensors of
a model are checked before it is passed to ONNX Runtime.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

from onnxtrain.runtime import dtypes
from onnxtrain.runtime import onnx_proto as proto
from onnxtrain.runtime import onnx_wire as wire
from onnxtrain.runtime.onnx_wire import Bytes

_KEY = b"location"
_CHUNK = 2**20
# protobuf itself supports at most 100 nested messages; a subgraph takes three of them.
_MAX_DEPTH = 100
# TensorProto.DataLocation.EXTERNAL.
_EXTERNAL = 1
# With this location, onnxruntime interprets the offset as an address in the memory of the process.
_IN_MEMORY = "_ORT_MEM_ADDR_"
# protobuf truncates the varint of an enumeration to 32 bits, so 2**32 + 1 is EXTERNAL as well.
_ENUM = 0xFFFFFFFF

_CODES_BY_BITS = {2: (25, 26), 4: (21, 22, 23), 6: (27, 28), 8: (17, 18, 19, 20, 24), 64: (14,), 128: (15,)}
# Bits per element of types that `dtypes` does not list: complex numbers, small floats and integers.
_BITS_OF_OTHERS = {code: bits for bits, codes in _CODES_BY_BITS.items() for code in codes}


class ExternalData(NamedTuple):
    """The location of a tensor's data in an external file.

    Attributes:
        name: name of the tensor, e.g. "fc.weight".
        location: path of the file, relative to the model's directory, e.g. "net.onnx.data".
        offset: position of the data in the file, in bytes, e.g. 4096.
        length: size of the data in bytes according to the model; None if it is not given.
        needed: size in bytes according to dtype and shape; None for strings and unknown dtypes.
    """

    name: str
    location: str
    offset: int
    length: int | None
    needed: int | None


def bits_of(code: int) -> int | None:
    """Returns the bits per element of an ONNX data type, e.g. 32 for code 1 (float32); None if unknown or a string."""
    dtype = dtypes.BY_ONNX.get(code)
    return dtype.storage.itemsize * 8 if dtype is not None else _BITS_OF_OTHERS.get(code)


def _dims(tensor: Bytes) -> list[int]:
    """Returns the dims of a TensorProto."""
    # A repeated number may be packed or have one field per number; protobuf readers must accept both.
    dims: list[int] = []
    for field in wire.parse(tensor):
        if field.number == proto.TENSOR_DIMS:
            dims += wire.varints(field.payload) if len(field.payload) else [field.integer]
    return dims


def parse_reference(tensor: Bytes) -> ExternalData | None:
    """Returns the location of a TensorProto's external data; None if the message contains the data itself.

    Raises:
        ValueError: the entries are malformed, or two readers could interpret them differently.
    """
    fields = list(wire.parse(tensor))
    if not any(f.number == proto.TENSOR_LOCATION and f.integer & _ENUM == _EXTERNAL for f in fields):
        return None
    name = wire.string(tensor, proto.TENSOR_NAME)
    entries: dict[str, str] = {}
    for entry in (f.payload for f in fields if f.number == proto.TENSOR_EXTERNAL):
        keys, values = wire.strings(entry, 1), wire.strings(entry, 2)
        # If a key occurs twice, some readers use the first value and others the last.
        if len(keys) != 1 or len(values) > 1 or keys[0] in entries:
            raise ValueError(f"the external data entries of '{name}' are malformed")
        entries[keys[0]] = values[0] if values else ""
    numbers = {}
    for key in ("offset", "length"):
        if key in entries:
            # 18 digits fit an int64. `int` alone would also accept "+1", " 1" and "1_000".
            if not re.fullmatch("[0-9]{1,18}", entries[key]):
                raise ValueError(
                    f"the {key} of the data of '{name}' is {entries[key][:40]!r}, which is not a size"
                )
            numbers[key] = int(entries[key])
    dims = _dims(tensor)
    # The varint of a negative number is its two's complement.
    if any(d >= 2**63 for d in dims):
        raise ValueError(f"'{name}' has a negative size")
    code = next((f.integer for f in reversed(fields) if f.number == proto.TENSOR_TYPE), 0)
    bits = bits_of(code)
    needed = None if bits is None else (prod(dims) * bits + 7) // 8
    return ExternalData(
        name, entries.get("location", ""), numbers.get("offset", 0), numbers.get("length"), needed
    )


def locate(data: ExternalData, directory: str | os.PathLike[str]) -> Path:
    """Returns the path of the file with a tensor's external data, after checking that the file is safe to read.

    Args:
        data: location of the data according to the model.
        directory: directory of the model.

    Raises:
        ValueError: the file is missing, too short, or outside `directory`, or the location is not a path. The message
            describes the problem.
    """
    base = Path(directory).resolve()
    what = f"the data of '{data.name}' should be in '{Path(directory) / data.location}'"
    # Both kinds of paths, because a model that is safe here may be copied to the other operating system.
    names = PurePosixPath(data.location), PureWindowsPath(data.location)
    if not data.location or "\0" in data.location or _IN_MEMORY in data.location:
        raise ValueError(
            f"the data of '{data.name}' is in {data.location!r}, which is not a file. Export the model again."
        )
    outside = f"{what}, which is outside the model's directory '{base}'. Copy the file there."
    if any(name.is_absolute() or name.drive or ".." in name.parts for name in names):
        raise ValueError(outside)
    # A name without `..` can still lead outside by a symbolic link.
    path = (base / data.location).resolve()
    if not path.is_relative_to(base):
        raise ValueError(outside)
    if not path.is_file():
        raise ValueError(f"{what}, which does not exist. Put that file in the model's directory.")
    if data.needed is not None and data.length is not None and data.length < data.needed:
        raise ValueError(
            f"{what}, but its entry has {data.length} bytes instead of the {data.needed} that "
            "the tensor needs."
        )
    # Some runtimes read beyond the end of the file instead of rejecting it.
    size = path.stat().st_size
    end = data.offset + max(data.length or 0, data.needed or 0)
    if end > size:
        raise ValueError(
            f"{what} at bytes {data.offset} to {end}, but the file has only {size} bytes: it is truncated. "
            "Copy or export it again."
        )
    return path


def _joined(message: Bytes, number: int) -> Bytes:
    """Returns the payload of a non-repeated field: merged if the field occurs several times, b"" if it is absent."""
    # protobuf merges repeated occurrences of a field, which is equivalent to concatenating the bytes.
    payloads = wire.messages(message, number)
    return payloads[0] if len(payloads) == 1 else b"".join(payloads)


def _graph_tensors(graph: Bytes, depth: int) -> Iterator[Bytes]:
    """Yields every TensorProto of a graph; `depth` is the number of messages that enclose the graph."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"its graphs are nested more than {_MAX_DEPTH // 3} deep")
    for field in wire.parse(graph):
        if field.number == proto.GRAPH_NODE:
            yield from _node_tensors(field.payload, depth + 1)
        elif field.number == proto.GRAPH_INITIALIZER:
            yield field.payload
        # A sparse initializer consists of two tensors, values and indices.
        elif field.number == proto.GRAPH_SPARSE:
            yield from (_joined(field.payload, 1), _joined(field.payload, 2))


def _node_tensors(node: Bytes, depth: int) -> Iterator[Bytes]:
    """Yields every TensorProto in the attributes of a node; `depth` is the number of messages that enclose the node."""
    for attribute in wire.messages(node, proto.NODE_ATTRIBUTE):
        yield from _attribute_tensors(attribute, depth + 1)


def _attribute_tensors(attribute: Bytes, depth: int) -> Iterator[Bytes]:
    """Yields every TensorProto of an attribute and of its subgraphs.

    Args:
        attribute: the AttributeProto.
        depth: number of messages that enclose the attribute.
    """
    # t and tensors, sparse_tensor and sparse_tensors, g and graphs.
    yield from (_joined(attribute, 5), *wire.messages(attribute, 10))
    for sparse in (_joined(attribute, 22), *wire.messages(attribute, 23)):
        yield from (_joined(sparse, 1), _joined(sparse, 2))
    for graph in (
        _joined(attribute, proto.ATTRIBUTE_GRAPH),
        *wire.messages(attribute, proto.ATTRIBUTE_GRAPHS),
    ):
        yield from _graph_tensors(graph, depth + 1)


def tensor_messages(model: Bytes) -> Iterator[Bytes]:
    """Yields every TensorProto in the initializers and attributes of a model, its subgraphs and its functions."""
    yield from _graph_tensors(_joined(model, proto.MODEL_GRAPH), 0)
    # training_info contains two graphs, initialization and algorithm, which a runtime may load.
    for training in wire.messages(model, proto.MODEL_TRAINING):
        for number in (1, 2):
            yield from _graph_tensors(_joined(training, number), 0)
    for function in wire.messages(model, proto.MODEL_FUNCTION):
        for node in wire.messages(function, proto.FUNCTION_NODE):
            yield from _node_tensors(node, 0)
        for attribute in wire.messages(function, proto.FUNCTION_ATTRIBUTE):
            yield from _attribute_tensors(attribute, 0)


def _names_locations(path: str) -> bool:
    """True if a model file contains the word "location", which every reference to external data contains."""
    # Most models have no external data. Searching for the word is as fast as reading the file, unlike parsing it.
    with open(path, "rb") as file:
        tail = b""
        while chunk := file.read(_CHUNK):
            if _KEY in tail + chunk:
                return True
            # The word may span two chunks.
            tail = chunk[-len(_KEY) :]
    return False


def _references(model: Bytes) -> Iterator[ExternalData]:
    """Yields the location of the data for each tensor of a model whose data is in an external file."""
    for tensor in tensor_messages(model):
        if (data := parse_reference(tensor)) is not None:
            yield data


def check_external_data(model: str | bytes) -> None:
    """Checks that all external data of a model exists and is in the model's directory.

    Args:
        model: path of the model file, or its bytes. A model passed as bytes must have no external data.

    Raises:
        ValueError: data is missing, incomplete or outside the directory, or the model was passed as bytes and has
            external data. The message describes the problem.
        OSError: the model file cannot be read.
    """
    if isinstance(model, bytes):
        if _KEY in model and not is_ort_format(model):
            for data in _references(model):
                raise ValueError(
                    f"it was passed as bytes, but the data of '{data.name}' is in the external file "
                    f"'{data.location}'. Pass its path instead."
                )
        return
    external_files(model)


def external_files(path: str | os.PathLike[str]) -> list[Path]:
    """Returns the paths of the files with a model's external data, without duplicates.

    Raises:
        ValueError: a file is missing, too short, or outside the model's directory.
        OSError: the model file cannot be read.
    """
    path = os.fspath(path)
    if not _names_locations(path):
        return []
    # Imported here, because few devices have models with external data.
    import mmap

    with open(path, "rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if is_ort_format(content):
        return []
    directory = os.path.dirname(path) or "."
    return list(dict.fromkeys(locate(data, directory) for data in _references(content)))


def is_ort_format(content: Bytes) -> bool:
    """True if the content of a model file is in ORT format."""
    # ORT format is a FlatBuffer, with its identifier in these bytes. It is not a protobuf message, and has no external
    # data.
    return bytes(content[4:8]) == b"ORTM"
