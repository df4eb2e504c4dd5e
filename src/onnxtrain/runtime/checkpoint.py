"""Reads and writes checkpoints, which are safetensors files (`docs/reference/file-formats.md`, "The checkpoint").

Checkpoints of onnxruntime-training can be read as well.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from typing import BinaryIO

from onnxtrain.errors import CheckpointError
from onnxtrain.runtime import dtypes
from onnxtrain.runtime.atomic import finish_interrupted
from onnxtrain.runtime.json_text import list_of_texts, parse_json, sizes
from onnxtrain.runtime.legacy_checkpoint import IDENTIFIER, read_legacy_checkpoint
from onnxtrain.runtime.manifest import Signature, fingerprint
from onnxtrain.runtime.store import Buffer, OptimizerProgress, Store
from onnxtrain.runtime.tensor_file import read_tensors, require_file, verification, write_tensors, writing

FORMAT = "onnxtrain-checkpoint"
DELTA_FORMAT = "onnxtrain-checkpoint-delta"
VERSION = "1"
_PARAMETER, _STATISTIC = "parameter", "statistic"


def signatures(buffers: Mapping[str, Buffer]) -> list[Signature]:
    """Returns the name, dtype and shape of each buffer, e.g. [("w", "float32", (2, 3))]."""
    return [(name, b.dtype.name, b.shape) for name, b in buffers.items()]


def store_fingerprint(store: Store) -> str:
    """Returns the fingerprint of the model to which `store` belongs."""
    parameters, statistics = signatures(store.parameters), signatures(store.statistics)
    return fingerprint(parameters, statistics)


def common_metadata(store: Store, file_format: str, with_optimizer: bool) -> dict[str, str]:
    """Returns the metadata that checkpoints and deltas have in common.

    Args:
        store: the store to save.
        file_format: `FORMAT` for a checkpoint, `DELTA_FORMAT` for a delta.
        with_optimizer: True to include step count and learning rates.
    """
    progress = store.optimizer if with_optimizer else None
    # Values of safetensors metadata must be strings, so lists and objects are JSON.
    return {
        "format": file_format,
        "version": VERSION,
        "fingerprint": store_fingerprint(store),
        "trainable": json.dumps([n for n in store.parameters if n in store.trainable]),
        "properties": json.dumps(store.properties),
        "optimizer": json.dumps(progress and vars(progress)),
    }


def tensors_by_key(parameters: Mapping[str, Buffer], store: Store, with_optimizer: bool) -> dict[str, Buffer]:
    """Returns the tensors to save, as a dict from the key in the file, e.g. "parameter/fc.weight", to the tensor.

    Args:
        parameters: the parameters to save, by name.
        store: the store with the statistics to save.
        with_optimizer: True to include the moments of `store`.
    """
    groups = {_STATISTIC: store.statistics, _PARAMETER: parameters}
    if with_optimizer:
        groups |= store.moments
    return {f"{kind}/{name}": buffer for kind, group in groups.items() for name, buffer in group.items()}


def encode_checkpoint(
    store: Store, doing: str, *, include_optimizer_state: bool = False, nominal: bool = False
) -> Callable[[BinaryIO], None]:
    """Checks that `store` can be saved, and returns a function that writes it to an open file.

    Args:
        store: the store to save.
        doing: beginning of error messages, e.g. "Saving the checkpoint 'run/checkpoint'".
        include_optimizer_state: True to save moments, step count and learning rate as well.
        nominal: True to save names, dtypes and shapes of the parameters instead of their data. The data of statistics
            is saved in either case.

    Raises:
        CheckpointError: some parameters have no data, or shapes are unknown.
    """
    # A nominal checkpoint that was loaded and not completed has no data to save.
    nominal = nominal or (bool(store.parameters) and len(store.undefined()) == len(store.parameters))
    store.require_shapes(doing)
    if not nominal:
        store.require_defined(doing)
    with_optimizer = include_optimizer_state and not nominal
    # A nominal checkpoint has statistics, because `Module.copy_buffer_to_parameters`, which completes it, does not set
    # them.
    tensors = tensors_by_key({} if nominal else store.parameters, store, with_optimizer)
    metadata = common_metadata(store, FORMAT, with_optimizer)
    metadata |= {"order": json.dumps(list(store.parameters)), "nominal": json.dumps(nominal)}
    if nominal:
        metadata["shapes"] = json.dumps(
            {n: [b.dtype.name, list(b.shape)] for n, b in store.parameters.items()}
        )
    return lambda file: write_tensors(file, tensors, metadata)


def write_checkpoint(
    store: Store,
    uri: str | os.PathLike[str],
    *,
    include_optimizer_state: bool = False,
    nominal: bool = False,
) -> None:
    """Writes `store` to the file `uri`, atomically; see :func:`encode_checkpoint`.

    Raises:
        CheckpointError: the file cannot be written (an existing one is left intact), or some parameters have no data.
    """
    doing = f"Saving the checkpoint '{os.fspath(uri)}'"
    write = encode_checkpoint(store, doing, include_optimizer_state=include_optimizer_state, nominal=nominal)
    with writing(uri, doing) as file:
        write(file)


def _properties(text: str) -> dict[str, int | float | str]:
    """Parses the user's properties from JSON; raises ValueError if one is neither int, float nor str."""
    properties = parse_json(text)
    if not isinstance(properties, dict):
        raise ValueError("the properties are not a JSON object")
    if not all(isinstance(v, int | float | str) for v in properties.values()):
        raise ValueError("a property is neither int, float nor str")
    return properties


def _progress(text: str) -> OptimizerProgress | None:
    """Parses the step count and learning rates from JSON; returns None for the JSON value null.

    Raises:
        ValueError: the step count or a learning rate is out of range.
    """
    progress = parse_json(text)
    if progress is None:
        return None
    step = progress["step"]
    rates = [float(progress[key]) for key in ("learning_rate", "initial_learning_rate")]
    # The number of the next step is an int64, and a NaN rate would turn all parameters into NaN.
    if type(step) is not int or not 0 <= step < 2**62 or not all(0 <= rate < math.inf for rate in rates):
        raise ValueError(f"the optimizer cannot be at step {step} with the learning rate {rates[0]}")
    return OptimizerProgress(step, *rates)


def parse_store(metadata: Mapping[str, str], tensors: Mapping[str, Buffer]) -> Store:
    """Builds a store from the content of a checkpoint or delta.

    Args:
        metadata: the safetensors metadata of the file.
        tensors: tensors by key, e.g. {"parameter/fc.weight": Buffer}.

    Raises:
        ValueError: the file is inconsistent, or of an unsupported version.
        KeyError: an entry of the metadata is missing.
    """
    if metadata["version"] != VERSION:
        raise ValueError(
            f"it has version {metadata['version']}, but this onnxtrain reads {VERSION}; upgrade onnxtrain"
        )
    groups: dict[str, dict[str, Buffer]] = {_PARAMETER: {}, _STATISTIC: {}}
    for key, buffer in tensors.items():
        kind, slash, name = key.partition("/")
        if not slash:
            raise ValueError(f"unexpected tensor '{key}'")
        groups.setdefault(kind, {})[name] = buffer
    parameters, statistics = groups.pop(_PARAMETER), groups.pop(_STATISTIC)
    if parse_json(metadata.get("nominal", "false")):
        for name, (dtype, shape) in parse_json(metadata["shapes"]).items():
            parameters[name] = Buffer.zeros(dtypes.BY_NAME[dtype], sizes(shape, f"'{name}'"), defined=False)
    trainable = list_of_texts(parse_json(metadata["trainable"]), "what is trainable")
    # A delta has no `order`: it contains only the trainable parameters.
    order = trainable
    if "order" in metadata:
        order = list_of_texts(parse_json(metadata["order"]), "the order of the parameters")
    if sorted(order) != sorted(parameters):
        raise ValueError("the list of parameters does not match the tensors")
    if not set(trainable) <= set(order):
        raise ValueError("a trainable parameter is missing")
    for group in groups.values():
        # `Optimizer` checks the shapes: for Adafactor, those of moments and parameters differ.
        if not group.keys() <= parameters.keys():
            raise ValueError("optimizer state does not match the parameters")
    return Store(
        parameters={name: parameters[name] for name in order},
        trainable=set(trainable),
        statistics=statistics,
        moments=groups,
        optimizer=_progress(metadata["optimizer"]),
        properties=_properties(metadata["properties"]),
    )


def _assemble(metadata: Mapping[str, str], tensors: Mapping[str, Buffer]) -> Store:
    """Builds a store from the content of a full checkpoint, i.e. one that is not a delta.

    Args:
        metadata: the safetensors metadata of the file.
        tensors: tensors by key, e.g. {"parameter/fc.weight": Buffer}.

    Raises:
        ValueError: the file is not a full checkpoint, or is damaged.
    """
    if metadata.get("format") != FORMAT:
        raise ValueError("it is a safetensors file, but not an onnxtrain checkpoint")
    if not {"order", "nominal"} <= metadata.keys():
        raise ValueError("its list of parameters is missing")
    store = parse_store(metadata, tensors)
    # A missing fingerprint is accepted, because `fit_store` compares all names, dtypes and shapes with the model
    # anyway.
    expected = metadata.get("fingerprint")
    if expected and expected != store_fingerprint(store):
        raise ValueError("the fingerprint does not match the tensors")
    return store


def read_checkpoint(uri: str | os.PathLike[str]) -> Store:
    """Reads a checkpoint file of onnxtrain or onnxruntime-training.

    Raises:
        CheckpointError: the file is missing, truncated, corrupt, not a checkpoint, or a delta without its base
            checkpoint.
    """
    path = os.fspath(uri)
    source = f"'{path}'"
    with verification(source):
        finish_interrupted(path)
        require_file(path)
        with open(path, "rb") as file:
            # A FlatBuffer of onnxruntime-training has its identifier in bytes 4 to 8. In a safetensors file, these are
            # the upper half of the header length, which is zero.
            head = file.read(8)
            if head[4:] == IDENTIFIER:
                return read_legacy_checkpoint(head + file.read(), source)
        metadata, tensors = read_tensors(path)
        if metadata.get("format") == DELTA_FORMAT:
            raise CheckpointError(
                f"Loading {source}: it is a delta, which holds the trained parameters only. Load it on top of "
                "the full checkpoint it was trained from: CheckpointState.load_checkpoint(full, delta=...)."
            )
        return _assemble(metadata, tensors)
