"""Sparse gradients: gradients of only those rows of an embedding table that a batch has read."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from onnxtrain.runtime.device import Device
from onnxtrain.runtime.dtypes import Array, DType, narrow, widen


class RowGradient:
    """The sparse gradient of an embedding table `[n, *rest]`: one row per lookup, so its size varies between steps.

    Attributes:
        dtype: element type.
        shape: sizes of the table, e.g. (30000, 128).
        device: device of the gradient.
        rows: the gradient for each lookup, `[lookups, *rest]`. If a batch contains the same index twice, the
            two gradients must be summed.
        indices: the row of the table for each lookup, int64 `[lookups]`.
    """

    rows: ort.OrtValue
    indices: ort.OrtValue

    def __init__(self, dtype: DType, shape: tuple[int, ...], device: Device) -> None:
        self.dtype, self.shape, self.device = dtype, shape, device
        self.clear()

    def replace(self, rows: ort.OrtValue, indices: ort.OrtValue) -> None:
        """Replaces the gradient with the `rows` and `indices` computed by a new training step."""
        self.rows, self.indices = rows, indices

    def add(self, rows: ort.OrtValue, indices: ort.OrtValue) -> None:
        """Accumulates the gradient of a further step, by appending its rows."""
        # Appended, not summed: the optimizer accumulates rows with equal indices, as within a single step.
        self.rows = self._value(np.concatenate([self.read(), rows.numpy()]))
        self.indices = self._value(np.concatenate([self.indices.numpy(), indices.numpy()]))

    def clear(self) -> None:
        """Resets the gradient to zero rows."""
        self.rows = self._value(np.zeros((0, *self.shape[1:]), self.dtype.storage))
        self.indices = self._value(np.zeros(0, np.int64))

    def scale(self, factor: float) -> None:
        """Multiplies the gradient by a number."""
        # In the rows' dtype, so that a float64 factor does not widen float32 rows.
        rows = self.read()
        self.rows = self._value(np.asarray(rows * rows.dtype.type(factor)))

    def read(self) -> Array:
        """Returns :attr:`rows` as an array that shares its memory; it is valid until the gradient changes."""
        return np.asarray(self.rows.numpy())

    def dense(self) -> Array:
        """Returns the gradient of the whole table as a new, read-only array with the table's shape."""
        # Raw bfloat16 bits cannot be added.
        rows = widen(self.read(), self.dtype)
        total = np.zeros(self.shape, rows.dtype)
        np.add.at(total, self.indices.numpy(), rows)
        total = narrow(total, self.dtype)
        # Unlike for dense gradients, writing to the array would not modify the gradient.
        total.flags.writeable = False
        return total

    def move_to(self, device: Device) -> None:
        """Moves the gradient to `device`."""
        if device != self.device:
            self.device = device
            self.rows, self.indices = (
                self._value(self.read().copy()),
                self._value(self.indices.numpy().copy()),
            )

    def _value(self, array: Array) -> ort.OrtValue:
        """Converts an array to an OrtValue on the gradient's device; on the CPU, they share memory."""
        return ort.OrtValue.ortvalue_from_numpy(array, self.device.type, self.device.index)
