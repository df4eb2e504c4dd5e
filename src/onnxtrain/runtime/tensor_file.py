"""Reads and writes safetensors files.

Files are written with plain file operations, so that no tensor is copied. Before a file is read, the safetensors
package verifies it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from onnxtrain.errors import CheckpointError
from onnxtrain.runtime import dtypes
from onnxtrain.runtime.atomic import is_stream, replace_file
from onnxtrain.runtime.json_text import parse_json
from onnxtrain.runtime.store import Buffer


def write_tensors(file: BinaryIO, tensors: Mapping[str, Buffer], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file: header length (uint64), JSON header padded to 8 bytes, then the tensors."""
    # Widest elements first, so that every tensor is aligned to its element size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.storage.itemsize)
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for key, buffer in ordered:
        begin, end = end, end + buffer.size * buffer.dtype.storage.itemsize
        header[key] = {
            "dtype": buffer.dtype.safetensors,
            "shape": list(buffer.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    # `safetensors.numpy.save` would hold the whole file in memory.
    for _, buffer in ordered:
        file.write(buffer.read().reshape(-1).view(np.uint8).data)


@contextlib.contextmanager
def writing(uri: str | os.PathLike[str], doing: str) -> Iterator[BinaryIO]:
    """Context manager for writing a checkpoint file atomically: yields a binary file that replaces `uri` at the end.

    If an exception is raised in the `with` block, an existing file is left intact.

    Args:
        uri: path of the file.
        doing: beginning of the error message.

    Raises:
        CheckpointError: the file cannot be written.
    """
    try:
        with replace_file(uri) as file:
            yield file
    except OSError as error:
        raise CheckpointError(
            f"{doing} failed: {error}. An existing checkpoint is unchanged; check that the directory "
            "exists, is writable and has free space."
        ) from error


def _read_tensor(file: BinaryIO, start: int, entry: Mapping[str, Any]) -> Buffer:
    """Reads one tensor of a safetensors file.

    Args:
        file: the file.
        start: position after the header.
        entry: the header's entry for the tensor, e.g. {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}.

    Raises:
        ValueError: the element type is not supported.
    """
    dtype = dtypes.BY_SAFETENSORS.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"element type {entry['dtype']} is not supported")
    begin, end = entry["data_offsets"]
    file.seek(start + begin)
    flat = np.fromfile(file, dtype.storage, (end - begin) // dtype.storage.itemsize)
    return Buffer(flat.reshape(entry["shape"]), dtype)


def require_file(path: str) -> None:
    """Raises ValueError if a path refers to a pipe, socket or device, because reading it might never end."""
    if is_stream(path):
        raise ValueError("it is a pipe or a device, not a file")


def read_tensors(path: str) -> tuple[dict[str, str], dict[str, Buffer]]:
    """Returns a safetensors file's metadata and its tensors by key. Call it inside :func:`verification`."""
    require_file(path)
    # Opening the file verifies header, offsets and file size.
    with safe_open(path, framework="numpy"):
        pass
    # Read without the package, which requires ml_dtypes for bfloat16; devices don't have it.
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(length))
        metadata = header.pop("__metadata__", None) or {}
        return metadata, {key: _read_tensor(file, 8 + length, entry) for key, entry in header.items()}


@contextlib.contextmanager
def verification(source: str) -> Iterator[None]:
    """Context manager that converts exceptions caused by a damaged file to CheckpointError; `source` names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"Checkpoint verification failed. No such file: {source}.") from error
    except (
        SafetensorError,
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        MemoryError,
    ) as error:
        # The message of a KeyError is only the key.
        detail = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(
            f"Checkpoint verification failed. Reading {source}: {detail}. The file is truncated, corrupt "
            "or not a checkpoint; restore a backup, or generate the artifacts again."
        ) from error
