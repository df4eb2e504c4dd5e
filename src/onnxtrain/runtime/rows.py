"""Gradients of tables in the rows that were read."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from onnxtrain.runtime.device import Device
from onnxtrain.runtime.dtypes import Array, DType, narrow, widen


class RowGradient:
    """The gradient of a table `[n, *rest]`: a row for each read, of a size that changes from step to step.

    Attributes:
        dtype: Element type.
        shape: Sizes of the table.
        device: Where it is.
        rows: What the reads add to the gradient, `[reads, *rest]`.
        indices: The rows of the table that they have read, int64 `[reads]`.
    """

    rows: ort.OrtValue
    indices: ort.OrtValue

    def __init__(self, dtype: DType, shape: tuple[int, ...], device: Device) -> None:
        self.dtype, self.shape, self.device = dtype, shape, device
        self.rows = self._value(np.zeros((0, *shape[1:]), dtype.storage))
        self.indices = self._value(np.zeros(0, np.int64))

    def replace(self, rows: ort.OrtValue, indices: ort.OrtValue) -> None:
        """Holds the reads of one step."""
        self.rows, self.indices = rows, indices

    def add(self, rows: ort.OrtValue, indices: ort.OrtValue) -> None:
        """Adds the reads of a further step."""
        self.rows = self._value(np.concatenate([self.read(), rows.numpy()]))
        self.indices = self._value(np.concatenate([self.indices.numpy(), indices.numpy()]))

    def scale(self, factor: float) -> None:
        """Multiplies the gradient."""
        rows = self.read()
        self.rows = self._value(np.asarray(rows * rows.dtype.type(factor)))

    def read(self) -> Array:
        """Returns the rows: memory of :attr:`rows`, to be used before these are replaced."""
        return np.asarray(self.rows.numpy())

    def dense(self) -> Array:
        """Returns the gradient of the whole table, a new array that cannot be written to."""
        rows = widen(self.read(), self.dtype)
        total = np.zeros(self.shape, rows.dtype)
        np.add.at(total, self.indices.numpy(), rows)
        total = narrow(total, self.dtype)
        total.flags.writeable = False
        return total

    def move_to(self, device: Device) -> None:
        """Moves the content to `device`."""
        if device != self.device:
            self.device = device
            self.rows, self.indices = (
                self._value(self.read().copy()),
                self._value(self.indices.numpy().copy()),
            )

    def _value(self, array: Array) -> ort.OrtValue:
        """Returns a value of an array that nobody else writes to: on the CPU it is its memory."""
        return ort.OrtValue.ortvalue_from_numpy(array, self.device.type, self.device.index)
