"""Checkpoint files: one safetensors file per checkpoint (`docs/architecture.md`, "The checkpoint").

Written here with plain file operations, so that tensors go to the disk without a copy; verified on reading by
the safetensors package. Files of onnxruntime-training are recognised by their identifier and read as well.
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
from onnxtrain.runtime.atomic import replace_file
from onnxtrain.runtime.legacy_checkpoint import IDENTIFIER, read_legacy_checkpoint
from onnxtrain.runtime.manifest import Signature, fingerprint
from onnxtrain.runtime.store import Buffer, OptimizerProgress, Store

FORMAT = "onnxtrain-checkpoint"
VERSION = "1"
_PARAMETER, _STATISTIC = "parameter", "statistic"


def signatures(buffers: Mapping[str, Buffer]) -> list[Signature]:
    """Returns name, dtype and shape of each buffer."""
    return [(name, b.dtype.name, b.shape) for name, b in buffers.items()]


def _metadata(store: Store, optimizer: OptimizerProgress | None, nominal: bool) -> dict[str, str]:
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": fingerprint(signatures(store.parameters), signatures(store.statistics)),
        "trainable": json.dumps([n for n in store.parameters if n in store.trainable]),
        "order": json.dumps(list(store.parameters)),
        "properties": json.dumps(store.properties),
        "optimizer": json.dumps(optimizer and vars(optimizer)),
        "nominal": json.dumps(nominal),
    }
    if nominal:
        metadata["shapes"] = json.dumps(
            {n: [b.dtype.name, list(b.shape)] for n, b in store.parameters.items()}
        )
    return metadata


def _write(file: BinaryIO, tensors: Mapping[str, Buffer], metadata: dict[str, str]) -> None:
    """Writes a safetensors file: header length (uint64), JSON header padded to 8 bytes, then the tensors."""
    # Widest elements first keeps every tensor aligned to its element size.
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
    for _, buffer in ordered:
        file.write(buffer.read().reshape(-1).view(np.uint8).data)


def write_checkpoint(
    store: Store,
    uri: str | os.PathLike[str],
    *,
    include_optimizer_state: bool = False,
    nominal: bool = False,
) -> None:
    """Writes `store` to the file `uri`, replacing it whole or not at all.

    Args:
        store: What to save.
        uri: Path of the file.
        include_optimizer_state: Also save moments, step count and learning rate.
        nominal: Save names, dtypes and shapes of the parameters instead of their data. A store whose
            parameters are all still undefined is always saved so. Statistics keep their data: no buffer that
            completes a nominal checkpoint contains them.

    Raises:
        CheckpointError: The file cannot be written (a previous one is intact), or some parameters have no
            data.
    """
    where = f"Saving the checkpoint '{os.fspath(uri)}'"
    nominal = nominal or (bool(store.parameters) and len(store.undefined()) == len(store.parameters))
    store.require_shapes(where)
    tensors = {f"{_STATISTIC}/{name}": b for name, b in store.statistics.items()}
    if not nominal:
        store.require_defined(where)
        tensors.update({f"{_PARAMETER}/{name}": b for name, b in store.parameters.items()})
    with_optimizer = include_optimizer_state and not nominal
    if with_optimizer:
        for moment, group in store.moments.items():
            tensors.update({f"{moment}/{name}": b for name, b in group.items()})
    try:
        with replace_file(uri) as file:
            _write(file, tensors, _metadata(store, store.optimizer if with_optimizer else None, nominal))
    except OSError as error:
        raise CheckpointError(
            f"{where} failed: {error}. A checkpoint that was there before is unchanged; check that the "
            "directory exists, is writable and has room."
        ) from error


def _read_tensor(file: BinaryIO, start: int, entry: Mapping[str, Any]) -> Buffer:
    dtype = dtypes.BY_SAFETENSORS.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"element type {entry['dtype']} is not supported")
    begin, end = entry["data_offsets"]
    file.seek(start + begin)
    flat = np.fromfile(file, dtype.storage, (end - begin) // dtype.storage.itemsize)
    return Buffer(flat.reshape(entry["shape"]), dtype)


def _group(tensors: Mapping[str, Buffer]) -> dict[str, dict[str, Buffer]]:
    """Returns the tensors by the part of their key before the first slash, then by name."""
    groups: dict[str, dict[str, Buffer]] = {_PARAMETER: {}, _STATISTIC: {}}
    for key, buffer in tensors.items():
        kind, slash, name = key.partition("/")
        if not slash:
            raise ValueError(f"unexpected tensor '{key}'")
        groups.setdefault(kind, {})[name] = buffer
    return groups


def _properties(text: str) -> dict[str, int | float | str]:
    properties = json.loads(text)
    if not all(isinstance(v, int | float | str) for v in properties.values()):
        raise ValueError("a property is neither int, float nor str")
    return dict(properties)


def _assemble(metadata: Mapping[str, str], tensors: Mapping[str, Buffer]) -> Store:
    """Builds a store from the content of a file; ValueError or KeyError if it does not hang together."""
    if metadata.get("format") != FORMAT:
        raise ValueError("it is a safetensors file, but not a checkpoint of onnxtrain")
    if metadata["version"] != VERSION:
        raise ValueError(
            f"it has version {metadata['version']}, this onnxtrain reads {VERSION}; upgrade onnxtrain"
        )
    moments = _group(tensors)
    parameters, statistics = moments.pop(_PARAMETER), moments.pop(_STATISTIC)
    if json.loads(metadata["nominal"]):
        for name, (dtype, shape) in json.loads(metadata["shapes"]).items():
            parameters[name] = Buffer.zeros(dtypes.BY_NAME[dtype], shape, defined=False)
    order, trainable = json.loads(metadata["order"]), set(json.loads(metadata["trainable"]))
    if sorted(order) != sorted(parameters):
        raise ValueError("the list of parameters does not match the tensors")
    if not trainable <= set(order):
        raise ValueError("a trainable parameter is missing")
    for group in moments.values():
        if any(name not in parameters or b.shape != parameters[name].shape for name, b in group.items()):
            raise ValueError("optimizer state does not match the parameters")
    progress = json.loads(metadata["optimizer"])
    store = Store(
        parameters={name: parameters[name] for name in order},
        trainable=trainable,
        statistics=statistics,
        moments=moments,
        optimizer=None
        if progress is None
        else OptimizerProgress(
            int(progress["step"]), float(progress["learning_rate"]), float(progress["initial_learning_rate"])
        ),
        properties=_properties(metadata["properties"]),
    )
    expected = metadata.get("fingerprint")
    if expected and expected != fingerprint(signatures(store.parameters), signatures(store.statistics)):
        raise ValueError("the fingerprint does not match the tensors")
    return store


@contextlib.contextmanager
def _verification(source: str) -> Iterator[None]:
    """Turns whatever a damaged file leads to into a CheckpointError."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"Checkpoint verification failed. There is no file {source}.") from error
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
        detail = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(
            f"Checkpoint verification failed. Reading {source}: {detail}. The file is truncated, corrupt or "
            "no checkpoint; restore it from another one, or generate the artifacts again."
        ) from error


def read_checkpoint(uri: str | os.PathLike[str]) -> Store:
    """Returns the content of a checkpoint file: ours or onnxruntime-training's, told apart by its start.

    Raises:
        CheckpointError: Missing, truncated, corrupt, or no checkpoint.
    """
    path = os.fspath(uri)
    source = f"'{path}'"
    with _verification(source):
        with open(path, "rb") as file:
            head = file.read(8)
            if head[4:] == IDENTIFIER:
                return read_legacy_checkpoint(head + file.read(), source)
        with safe_open(path, framework="numpy"):  # verifies header, offsets and file size
            pass
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__", None) or {}
            tensors = {key: _read_tensor(file, 8 + length, entry) for key, entry in header.items()}
        return _assemble(metadata, tensors)
