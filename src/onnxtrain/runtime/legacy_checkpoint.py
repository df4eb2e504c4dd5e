"""Reads checkpoint files of onnxruntime-training, so that its users can resume training.

Such a file is a FlatBuffer with identifier `ODTC`, version 2 (schema `checkpoint.fbs` of onnxruntime 1.19). A
FlatBuffer table starts with a signed offset back to its vtable. The vtable contains, for each field, its offset in the
table, or 0 if the field has its default. Offsets to strings, vectors and tables are relative to their own position.

The reader does not use the package `flatbuffers`, which devices don't have. It checks that each offset is inside the
file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import prod

import numpy as np

from onnxtrain.errors import CheckpointError
from onnxtrain.runtime import dtypes
from onnxtrain.runtime.store import Buffer, OptimizerProgress, Store

IDENTIFIER = b"ODTC"
_VERSION = 2


class _Table:
    """A FlatBuffer table. The methods take the index of a field in the schema, counted from 0.

    Args:
        data: content of the whole file.
        position: position of the table in `data`.
    """

    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self._position = position
        self._vtable = position - self._unpack("<i", position)
        self._vtable_size = self._unpack("<H", self._vtable)

    def _unpack(self, layout: str, position: int) -> int:
        # struct silently counts a negative position from the end of the data.
        if position < 0:
            raise ValueError("an offset points before the start of the file")
        return int(struct.unpack_from(layout, self._data, position)[0])

    def _field(self, index: int) -> int | None:
        """Returns the position in the file of field number `index`; None if the field is absent."""
        # The vtable begins with two sizes of two bytes each. Files of an older schema have shorter vtables; missing
        # fields have their defaults.
        slot = 4 + 2 * index
        offset = self._unpack("<H", self._vtable + slot) if slot < self._vtable_size else 0
        return self._position + offset if offset else None

    def _target(self, position: int) -> int:
        return position + self._unpack("<I", position)

    def _vector(self, index: int, itemsize: int) -> tuple[int, int]:
        """Locates a vector field.

        Args:
            index: index of the field in the schema.
            itemsize: size of an element, in bytes.

        Returns:
            The position of the first element in the file, and the number of elements; (0, 0) if the field is absent.

        Raises:
            ValueError: the vector extends beyond the end of the file.
        """
        position = self._field(index)
        if position is None:
            return 0, 0
        start = self._target(position)
        length = self._unpack("<I", start)
        # Checked before memory is allocated: a damaged length may be four billion.
        if start + 4 + length * itemsize > len(self._data):
            raise ValueError("a vector reaches beyond the end of the file")
        return start + 4, length

    def integer(self, index: int, layout: str, default: int = 0) -> int:
        position = self._field(index)
        return default if position is None else self._unpack(layout, position)

    def real(self, index: int) -> float:
        position = self._field(index)
        return 0.0 if position is None else float(struct.unpack_from("<f", self._data, position)[0])

    def blob(self, index: int) -> bytes:
        start, length = self._vector(index, 1)
        return self._data[start : start + length]

    def text(self, index: int) -> str:
        return self.blob(index).decode()

    def int64s(self, index: int) -> tuple[int, ...]:
        start, length = self._vector(index, 8)
        return struct.unpack_from(f"<{length}q", self._data, start)

    def table(self, index: int) -> _Table | None:
        position = self._field(index)
        return None if position is None else _Table(self._data, self._target(position))

    def tables(self, index: int) -> Iterator[_Table]:
        start, length = self._vector(index, 4)
        for position in range(start, start + 4 * length, 4):
            yield _Table(self._data, self._target(position))


def _tensor(table: _Table, nominal: bool) -> tuple[str, Buffer]:
    """Reads a tensor from a table `Tensor{name, doc_string, dims, data_type, raw_data, string_data}`.

    Args:
        table: the table.
        nominal: True if the file has no data for the tensor, so that the returned buffer is undefined.

    Returns:
        The name and the content of the tensor.

    Raises:
        ValueError: the element type is not supported, or the shape does not match the data.
    """
    name, dims, code, raw = table.text(0), table.int64s(2), table.integer(3, "<i"), table.blob(4)
    dtype = dtypes.BY_ONNX.get(code)
    if dtype is None:
        raise ValueError(f"tensor '{name}' has ONNX element type {code}, which is not supported")
    if any(d < 0 for d in dims):
        raise ValueError(f"tensor '{name}' has shape {dims}")
    if nominal:
        return name, Buffer.zeros(dtype, dims, defined=False)
    if len(raw) != prod(dims) * dtype.storage.itemsize:
        raise ValueError(f"tensor '{name}' of shape {dims}, {dtype.name}, has {len(raw)} bytes of data")
    # A copy, because frombuffer returns a read-only view, and sessions write to buffers.
    return name, Buffer(np.frombuffer(raw, dtype.storage).reshape(dims).copy(), dtype)


def _read_optimizer(group: _Table, store: Store) -> None:
    """Adds the optimizer state in a table of a checkpoint to `store`.

    Args:
        group: table `OptimizerGroup{group_name, step, initial_learning_rate, optimizer_states}`.
        store: modified in place.
    """
    # The format does not include the current learning rate; the initial one is the closest.
    rate = group.real(2)
    store.optimizer = OptimizerProgress(group.integer(1, "<q"), rate, rate)
    for state in group.tables(3):
        parameter = state.text(0)
        for momentum in state.tables(1):
            name, buffer = _tensor(momentum, nominal=False)
            store.moments.setdefault(name, {})[parameter] = buffer
    # onnxruntime-training had two optimizers: AdamW with two moments, and SGD with an unused one. Our SGD has no
    # moments, and rejects a checkpoint with some.
    if set(store.moments) == {"momentum0"}:
        store.moments.clear()


def _read_properties(bag: _Table, store: Store) -> None:
    """Adds the properties in a table of a checkpoint to `store`.

    Args:
        bag: table `PropertyBag{ints, floats, strings}`, whose fields are vectors of tables `{name, value}`.
        store: modified in place.
    """
    for entry in bag.tables(0):
        store.properties[entry.text(0)] = entry.integer(1, "<q")
    for entry in bag.tables(1):
        store.properties[entry.text(0)] = entry.real(1)
    for entry in bag.tables(2):
        store.properties[entry.text(0)] = entry.text(1)


def _read(data: bytes) -> Store:
    """Parses the content of an onnxruntime-training checkpoint file.

    Its root table is `Checkpoint{version, module_state, optimizer_groups, property_bag}`.
    """
    root = _Table(data, struct.unpack_from("<I", data)[0])
    version = root.integer(0, "<i")
    if version != _VERSION:
        raise ValueError(f"format version {version}, expected {_VERSION}")
    module = root.table(1)
    if module is None:
        raise ValueError("it contains no parameters")
    if module.integer(3, "<?"):
        raise ValueError("its tensors are in an external data file, which is not supported")
    # A nominal file has neither data nor shapes: `shapes_known` is False until a Module provides them.
    nominal = bool(module.integer(2, "<?"))
    trainable = dict(_tensor(t, nominal) for t in module.tables(0))
    frozen = dict(_tensor(t, nominal) for t in module.tables(1))
    parameters = {**trainable, **frozen}
    store = Store(parameters=parameters, trainable=set(trainable), shapes_known=not nominal)
    groups = list(root.tables(2))
    if len(groups) > 1:
        raise ValueError(f"it has {len(groups)} optimizer groups, and only one is supported")
    for group in groups:
        _read_optimizer(group, store)
    bag = root.table(3)
    if bag is not None:
        _read_properties(bag, store)
    return store


def read_legacy_checkpoint(data: bytes, source: str) -> Store:
    """Reads an onnxruntime-training checkpoint from the content of its file; `source` names the file in errors.

    Raises:
        CheckpointError: the file is corrupt, truncated, or of an unsupported kind.
    """
    try:
        return _read(data)
    except (struct.error, ValueError, OverflowError, MemoryError) as error:
        raise CheckpointError(
            f"Checkpoint verification failed. Reading {source} as an onnxruntime-training checkpoint: "
            f"{error}."
        ) from error
