"""Turns the trained part of a state into a Flower record, and back: what messages carry."""

from __future__ import annotations

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
    """The dtype and shape that an array of a message must have.

    Attributes:
        dtype: dtype in the message, e.g. float32. float16 and bfloat16 travel as float32: averages of them need the
            digits, and numpy has no bfloat16.
        shape: sizes, e.g. (10, 64).
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]


def _trained(state: CheckpointState) -> dict[str, Buffer]:
    """Returns the tensors that change in training, by name: trainable parameters, then statistics of BatchNorm."""
    # The order is that of the model: Flower's mods compare the names of both ways as lists.
    store = state._store
    parameters = {name: buffer for name, buffer in store.parameters.items() if name in store.trainable}
    return parameters | store.statistics


def _expected(tensors: Iterable[tuple[str, ParameterSpec | StatisticSpec | Buffer]]) -> dict[str, Expected]:
    """Returns what the arrays of a message must be, from the tensors that they stand for."""
    return {
        name: Expected(
            dtypes.widen(np.zeros(0, tensor.dtype.storage), tensor.dtype).dtype, tuple(tensor.shape)
        )
        for name, tensor in tensors
    }


def expected_arrays(manifest: Manifest) -> dict[str, Expected]:
    """Returns the arrays that a message of this model must hold, by name, in their order."""
    specs: list[ParameterSpec | StatisticSpec] = [*manifest.trainable, *manifest.statistics]
    return _expected((spec.name, spec) for spec in specs)


def trained_arrays(state: CheckpointState) -> ArrayRecord:
    """Returns what a message carries: trainable parameters and running statistics, by name.

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


def find_fault(arrays: Mapping[str, Array], expected: Mapping[str, Expected]) -> str | None:
    """Describes what is wrong with the arrays of a message; None if nothing is.

    Args:
        arrays: arrays by name.
        expected: what they must be, see `expected_arrays`.

    Returns:
        E.g. "'fc.weight' has shape [3, 4], expected [4, 3]".
    """
    # Names first: with other names it is another model, and shapes say nothing.
    missing = [name for name in expected if name not in arrays]
    extra = [name for name in arrays if name not in expected]
    if missing or extra:
        parts = [f"it lacks {missing[:3]}"] * bool(missing) + [
            f"it has {extra[:3]}, which are not trained"
        ] * bool(extra)
        return f"it belongs to another model: {' and '.join(parts)}"
    for name, array in arrays.items():
        # A shape that broadcasts would be averaged without an error: [1, 64] beside [32, 64].
        dtype, shape = expected[name]
        if tuple(array.shape) != shape:
            return f"'{name}' has shape {list(array.shape)}, expected {list(shape)}"
        if array.dtype != dtype:
            return f"'{name}' is {array.dtype}, expected {dtype}"
        # One NaN makes every average of the element NaN, in all later rounds.
        wrong = int(array.size - np.isfinite(array).sum())
        if wrong:
            return f"'{name}' holds NaN or infinity in {wrong} of {array.size} elements"
    return None


def apply_arrays(state: CheckpointState, record: ArrayRecord) -> None:
    """Writes the arrays of a message into a state.

    Args:
        state: state of the model; nothing of it changes if the message does not fit.
        record: a Flower `ArrayRecord` as `trained_arrays` returns it.

    Raises:
        InputError: names, dtypes or shapes are those of another model, or a value is NaN or infinite.
    """
    trained = _trained(state)
    arrays = {name: array.numpy() for name, array in record.items()}
    # Checked as a whole before anything is written, so that no state is half of one model and half of another.
    fault = find_fault(arrays, _expected(trained.items()))
    if fault is not None:
        raise InputError(
            f"Writing received arrays into the model: {fault}. Server and clients must hold the same artifacts."
        )
    with state.lock:
        for name, buffer in trained.items():
            buffer.write(dtypes.narrow(arrays[name], buffer.dtype))
