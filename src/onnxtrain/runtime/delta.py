"""Reads and writes deltas: checkpoints with only the trained parameters (`docs/reference/file-formats.md`).

A model trained with a frozen backbone differs from its base checkpoint in a few tensors. A delta contains these tensors
and a digest of the frozen ones, so that it cannot be loaded on top of other frozen values.
"""

from __future__ import annotations

import hashlib
import json
import os

import numpy as np

from onnxtrain.errors import CheckpointError
from onnxtrain.runtime.checkpoint import (
    DELTA_FORMAT,
    FORMAT,
    common_metadata,
    parse_store,
    signatures,
    tensors_by_key,
)
from onnxtrain.runtime.manifest import fingerprint
from onnxtrain.runtime.matching import describe_mismatch, join_differences
from onnxtrain.runtime.store import Buffer, Store
from onnxtrain.runtime.tensor_file import read_tensors, verification, write_tensors, writing


def frozen_digest(parameters: dict[str, Buffer], trainable: set[str]) -> str:
    """Returns the SHA-256 (hexadecimal) of the frozen parameters.

    The digest covers all frozen parameters, sorted by name: for each, the UTF-8 text of `[name, dtype, shape]` (compact
    JSON without ASCII escapes), followed by its bytes.
    """
    digest = hashlib.sha256()
    for name, buffer in sorted(parameters.items()):
        if name not in trainable:
            signature = [name, buffer.dtype.name, list(buffer.shape)]
            digest.update(json.dumps(signature, separators=(",", ":"), ensure_ascii=False).encode())
            digest.update(buffer.read().reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def write_delta(store: Store, uri: str | os.PathLike[str], *, include_optimizer_state: bool = False) -> None:
    """Writes the trained parameters, statistics and properties of `store` to the file `uri`.

    Raises:
        CheckpointError: the file cannot be written (an existing one is left intact), or some parameters have no data.
    """
    where = f"Saving the delta '{os.fspath(uri)}'"
    store.require_shapes(where)
    store.require_defined(where)
    trained = {name: b for name, b in store.parameters.items() if name in store.trainable}
    metadata = common_metadata(store, DELTA_FORMAT, include_optimizer_state)
    metadata["frozen"] = frozen_digest(store.parameters, store.trainable)
    with writing(uri, where) as file:
        write_tensors(file, tensors_by_key(trained, store, include_optimizer_state), metadata)


def read_delta(uri: str | os.PathLike[str], base: Store, base_uri: str | os.PathLike[str]) -> Store:
    """Applies a delta to the base checkpoint with which it was trained.

    Args:
        uri: path of the delta.
        base: content of the base checkpoint; not modified.
        base_uri: path of the base checkpoint, for error messages.

    Returns:
        A store with the frozen parameters of `base` and the content of the delta: trained parameters, statistics,
        properties and, if it was saved, optimizer state.

    Raises:
        CheckpointError: the file is missing, truncated, corrupt or not a delta, or the delta was trained on top of a
            different base checkpoint.
    """
    source = f"'{os.fspath(uri)}'"
    where = f"Loading the delta {source} on top of '{os.fspath(base_uri)}'"
    base.require_shapes(where)
    base.require_defined(where)
    with verification(source):
        metadata, tensors = read_tensors(os.fspath(uri))
        if metadata.get("format") != DELTA_FORMAT:
            kind = (
                "full checkpoint" if metadata.get("format") == FORMAT else "safetensors file of another kind"
            )
            raise CheckpointError(
                f"{where}: it is a {kind}. Save deltas with CheckpointState.save_checkpoint(..., "
                "trainable_only=True)."
            )
        delta = parse_store(metadata, tensors)
        model, frozen = metadata["fingerprint"], metadata["frozen"]
    # Trained parameters are compared one by one, so that the message can name them. For the frozen ones, the delta has
    # only a fingerprint.
    differences = _differences(base, delta)
    if not differences and fingerprint(signatures(base.parameters), signatures(delta.statistics)) != model:
        differences = ["names, dtypes or shapes of parameters that it does not contain differ"]
    if differences:
        raise CheckpointError(
            f"{where}: the delta belongs to another model: {join_differences(differences)}. Load the "
            "checkpoint it was trained from."
        )
    if frozen_digest(base.parameters, delta.trainable) != frozen:
        raise CheckpointError(
            f"{where}: the model is the same, but the delta was trained on top of other values of the "
            "parameters that it does not contain. Load the checkpoint it was trained from."
        )
    return Store(
        parameters=base.parameters | delta.parameters,
        trainable=delta.trainable,
        statistics=delta.statistics,
        moments=delta.moments,
        optimizer=delta.optimizer,
        properties=delta.properties,
    )


def _differences(base: Store, delta: Store) -> list[str]:
    """Describes how a delta's trained parameters don't match `base`: missing names, different dtypes or shapes."""
    differences = []
    for name, buffer in delta.parameters.items():
        base_buffer = base.parameters.get(name)
        if base_buffer is None:
            differences.append(f"parameter '{name}' is not in the checkpoint")
        elif mismatch := describe_mismatch(buffer, "the delta", base_buffer):
            differences.append(f"parameter '{name}' {mismatch}")
    return differences
