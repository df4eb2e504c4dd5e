"""Keeps moving averages of trained parameters and BatchNorm statistics, for `ema_decay` and the callback `SWA`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from onnxtrain._words import argument
from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.runtime.dtypes import BY_NAME, Array, narrow, widen
from onnxtrain.runtime.store import Buffer, Store
from onnxtrain.runtime.tensor_file import read_tensors, verification, write_tensors

# Distinguishes the file from a checkpoint, which is a safetensors file too.
_FORMAT = {"format": "onnxtrain-average", "version": "1"}


def check_decay(decay: float | None) -> float | None:
    """Checks `ema_decay` and returns it as a float; None means no averages and is returned unchanged.

    Raises:
        InputError: the decay is not a number in [0, 1).
    """
    if decay is None:
        return None
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
        raise InputError(
            f"{argument('ema_decay')} must be a number such as 0.999, at least 0 and less than 1, received {decay!r}."
        )
    return float(decay)


class MovingAverage:
    """Averages of trained parameters and BatchNorm statistics: `(1 - share) * average + share * value`.

    The first update, with a share of 1, copies the values, as in `torch.optim.swa_utils.AveragedModel`. Averages of
    float16 and bfloat16 values are float32, because half precision would round small updates to zero.

    Args:
        store: tensors of the run.
    """

    def __init__(self, store: Store) -> None:
        self._values = {
            **{
                f"parameter/{name}": store.parameters[name]
                for name in store.parameters
                if name in store.trainable
            },
            **{f"statistic/{name}": buffer for name, buffer in store.statistics.items()},
        }
        self.buffers: dict[str, Buffer] = {
            key: Buffer.zeros(
                BY_NAME["float32"] if value.dtype.name in ("float16", "bfloat16") else value.dtype,
                value.shape,
            )
            for key, value in self._values.items()
        }
        self._applied = False

    @property
    def is_applied(self) -> bool:
        """True while the averages replace the values."""
        return self._applied

    def update(self, share: float) -> None:
        """Updates the averages with the current values.

        Args:
            share: weight of the current values, e.g. 0.001 for a decay of 0.999. 1 copies the values.
        """
        for key, average in self.buffers.items():
            value = widen(self._values[key].read(), self._values[key].dtype)
            if share == 1:
                average.write(value)
                continue
            array = average.read()
            # In this form, the average of equal values stays exactly equal; the weighted sum of the class docstring
            # would round.
            change = value - array
            change *= array.dtype.type(share)
            np.add(array, change, out=array)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Context manager that replaces the values with their averages, and restores them at the end of the block."""
        # Nested use, e.g. evaluate within `trainer.averaged()`, must not keep the averages as the values.
        if self._applied:
            yield
            return
        # The values are restored afterwards: the optimizer's moments belong to them, not to the averages.
        kept: dict[str, Array] = {key: value.read().copy() for key, value in self._values.items()}
        self._applied = True
        try:
            self.put()
            yield
        finally:
            for key, value in self._values.items():
                value.write(kept[key])
            self._applied = False

    def put(self) -> None:
        """Replaces the values with the averages permanently."""
        for key, value in self._values.items():
            value.write(narrow(self.buffers[key].read(), value.dtype))

    def write(self, file: BinaryIO, **notes: str) -> None:
        """Writes the averages to a file; `notes` become its metadata, e.g. the number of updates."""
        write_tensors(file, self.buffers, _FORMAT | notes)

    def read(self, path: Path) -> dict[str, str]:
        """Reads the averages from a file that :meth:`write` wrote. Returns the file's metadata, including the notes.

        Raises:
            CheckpointError: the file is missing, damaged, or from a different model.
        """
        with verification(f"'{path}'"):
            metadata, tensors = read_tensors(str(path))
        if metadata.get("format") != _FORMAT["format"] or _kinds(tensors) != _kinds(self.buffers):
            raise CheckpointError(
                f"Reading the averages '{path}': they belong to another model. Copy the whole directory of "
                "the run."
            )
        for key, buffer in self.buffers.items():
            buffer.write(tensors[key].read())
        return metadata


def _kinds(buffers: Mapping[str, Buffer]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {key: (buffer.dtype.name, buffer.shape) for key, buffer in buffers.items()}
