"""Converts the trained part of a state to a Flower record (the content of messages), and back."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord

from onnxtrain.errors import InputError
from onnxtrain.runtime import dtypes
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.manifest import Manifest, ParameterSpec, StatisticSpec
from onnxtrain.runtime.state import CheckpointState
from onnxtrain.runtime.store import Buffer


class Expected(NamedTuple):
    """The dtype and shape that an array in a message must have.

    Attributes:
        dtype: dtype in the message, e.g. float32. float16 and bfloat16 are sent as float32: averages need the
            precision, and numpy has no bfloat16.
        shape: shape, e.g. (10, 64).
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]


def _trained(state: CheckpointState) -> dict[str, Buffer]:
    """Returns the tensors that training changes, by name: trainable parameters, then BatchNormalization statistics."""
    # In the model's order: Flower's mods compare the names sent and received as lists.
    store = state._store
    parameters = {name: buffer for name, buffer in store.parameters.items() if name in store.trainable}
    return parameters | store.statistics


def _expected(tensors: Iterable[tuple[str, ParameterSpec | StatisticSpec | Buffer]]) -> dict[str, Expected]:
    """Returns the dtypes and shapes that arrays in a message must have, given pairs (name, tensor or its spec)."""
    return {
        name: Expected(
            dtypes.widen(np.zeros(0, tensor.dtype.storage), tensor.dtype).dtype, tuple(tensor.shape)
        )
        for name, tensor in tensors
    }


def expected_arrays(manifest: Manifest) -> dict[str, Expected]:
    """Returns the dtypes and shapes that the arrays in a message for this model must have, by name, in order."""
    specs: list[ParameterSpec | StatisticSpec] = [*manifest.trainable, *manifest.statistics]
    return _expected((spec.name, spec) for spec in specs)


def trained_arrays(state: CheckpointState) -> ArrayRecord:
    """Returns the content of a message: trainable parameters and running statistics, by name.

    Args:
        state: state of a model, e.g. `CheckpointState.load_checkpoint("artifacts/checkpoint")`.

    Returns:
        A Flower `ArrayRecord` with copies of the arrays. float16 and bfloat16 are converted to float32.
    """
    # Another thread may be training the state.
    with state.lock:
        return ArrayRecord(
            {
                name: FlowerArray(np.array(dtypes.widen(buffer.read(), buffer.dtype)))
                for name, buffer in _trained(state).items()
            }
        )


def read_arrays(record: ArrayRecord, expected: Mapping[str, Expected]) -> dict[str, Array]:
    """Returns the arrays of a message by name, after validating each.

    Args:
        record: the message's arrays.
        expected: expected dtypes and shapes, from `expected_arrays`.

    Raises:
        ValueError: a name, shape, dtype or value is wrong, or the bytes are not an array; e.g. "'fc.weight' has shape
            [3, 4], expected [4, 3]".
    """
    # Names first: if they differ, it is a different model, and comparing shapes is pointless.
    missing = [name for name in expected if name not in record]
    extra = [name for name in record if name not in expected]
    if missing or extra:
        parts = [f"it lacks {missing[:3]}"] * bool(missing) + [
            f"it has {extra[:3]}, which are not trained"
        ] * bool(extra)
        raise ValueError(f"it belongs to another model: {' and '.join(parts)}")
    return {name: _read_array(name, record[name], expected[name]) for name in record}


def _read_array(name: str, sent: FlowerArray, expected: Expected) -> Array:
    """Decodes an array of a message, after checking its header.

    Args:
        name: name of the array, for error messages.
        sent: the array in the message, in NumPy's `.npy` format.
        expected: dtype and shape that the array must have.

    Raises:
        ValueError: the data cannot be decoded, the dtype or shape differs from `expected`, or an element is NaN or
            infinite.
    """
    try:
        # The header is checked first, because it determines how much memory is allocated, whatever the actual data.
        stream = io.BytesIO(sent.data)
        if np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError("it is not in NumPy's format 1.0")
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    except Exception as error:
        raise ValueError(f"{name!r} cannot be read ({error!r})") from error
    # Arrays that broadcast, such as [1, 64] and [32, 64], could be averaged without an error.
    if shape != expected.shape:
        raise ValueError(f"{name!r} has shape {list(shape)}, expected {list(expected.shape)}")
    if dtype != expected.dtype:
        raise ValueError(f"{name!r} is {dtype}, expected {expected.dtype}")
    try:
        array = sent.numpy()
    except Exception as error:
        raise ValueError(f"{name!r} cannot be read ({error!r})") from error
    require_finite(name, array)
    return array


def require_finite(name: str, array: Array) -> None:
    """Raises ValueError if an array contains NaN or infinity, which would persist in all later averages."""
    wrong = int(array.size - np.isfinite(array).sum())
    if wrong:
        raise ValueError(f"{name!r} holds NaN or infinity in {wrong} of {array.size} elements")


def apply_arrays(state: CheckpointState, record: ArrayRecord) -> None:
    """Writes the arrays of a message into a state.

    Args:
        state: state of the model; it does not change if the message is invalid.
        record: a Flower `ArrayRecord` as returned by `trained_arrays`.

    Raises:
        InputError: names, dtypes or shapes differ from the model's, or a value is NaN or infinite.
    """
    trained = _trained(state)
    # All arrays are checked before any is written, so that the state never mixes two models.
    try:
        arrays = read_arrays(record, _expected(trained.items()))
    except ValueError as error:
        raise InputError(
            f"Writing received arrays into the model: {error}. Server and clients must hold the same artifacts."
        ) from error
    with state.lock:
        for name, buffer in trained.items():
            buffer.write(dtypes.narrow(arrays[name], buffer.dtype))
