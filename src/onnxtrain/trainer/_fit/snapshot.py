"""Copies the training state in memory, so that training can return to it when it diverges."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.rows import RowGradient
from onnxtrain.runtime.store import Buffer, Store
from onnxtrain.trainer._run.position import Position

_BFLOAT16_EXPONENT = np.uint16(0x7F80)

# Elements per block of a sum: for longer vectors, BLAS starts threads of its own, which compete with ONNX Runtime's.
_BLOCK = 8192


def all_finite(buffer: Buffer | RowGradient) -> bool:
    """True if a floating-point buffer contains neither NaN nor infinity."""
    flat = buffer.read().reshape(-1)
    # bfloat16 is stored as raw bits; an exponent of all ones is NaN or infinity.
    if buffer.dtype.name == "bfloat16":
        return not ((flat & _BFLOAT16_EXPONENT) == _BFLOAT16_EXPONENT).any()
    # The sum is finite in nearly every case, and needs no temporary array. If it overflows, check each element.
    with np.errstate(over="ignore", invalid="ignore"):
        quick = np.add.reduce(flat)
    return bool(np.isfinite(quick)) or bool(np.isfinite(flat).all())


def finite_parameters(store: Store) -> bool:
    """True if all trainable parameters are finite."""
    return all(all_finite(store.parameters[name]) for name in store.trainable)


def not_finite(store: Store) -> str | None:
    """Names the tensors that contain NaN or infinity, for error messages.

    Returns:
        "parameters" or "running means of the optimizer"; None if all are finite.
    """
    if not finite_parameters(store):
        return "parameters"
    moments = (buffer for group in store.moments.values() for buffer in group.values())
    return None if all(map(all_finite, moments)) else "running means of the optimizer"


class FiniteCheck:
    """Checks the same tensors for NaN and infinity at every step.

    Args:
        buffers: floating-point tensors. The memory of CPU tensors must not move while the object is in use.
    """

    def __init__(self, buffers: Iterable[Buffer | RowGradient]) -> None:
        listed = list(buffers)
        # These are checked one by one: sums of squares overflow in half precision, device memory must be copied, and
        # sparse gradients change size.
        direct = {"float32", "float64"}
        self._others = [
            b
            for b in listed
            if b.device.type != "cpu" or b.dtype.name not in direct or isinstance(b, RowGradient)
        ]
        # On the CPU, `read` returns the memory itself.
        flat = [b.read().reshape(-1) for b in listed if all(b is not other for other in self._others)]
        self._flat = flat
        small = [array for array in flat if array.size <= _BLOCK]
        # Small tensors are concatenated first: copying them is cheaper than one call each.
        self._small = [
            [array for array in small if array.dtype == dtype] for dtype in {array.dtype for array in small}
        ]
        self._gathered = [np.empty(sum(map(len, group)), group[0].dtype) for group in self._small]
        self._blocks = [
            array[start : start + _BLOCK]
            for array in (*(array for array in flat if array.size > _BLOCK), *self._gathered)
            for start in range(0, array.size, _BLOCK)
        ]

    def __call__(self) -> bool:
        """Returns True if all tensors are finite."""
        for group, gathered in zip(self._small, self._gathered, strict=True):
            np.concatenate(group, out=gathered)
        # A sum of squares is not finite if an element is not, but it may also overflow; then check each element.
        total = sum(float(np.vdot(block, block)) for block in self._blocks)
        finite = math.isfinite(total) or all(np.isfinite(array).all() for array in self._flat)
        return finite and all(map(all_finite, self._others))


class StatisticsBackup:
    """Backup of the BatchNorm statistics from before a step, to restore if the step diverges.

    The training model computes the loss and updates the statistics in the same run, so the loss cannot be checked
    before the update.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._values = {name: np.empty_like(buffer.read()) for name, buffer in store.statistics.items()}

    def take(self) -> None:
        """Copies the current statistics."""
        for name, value in self._values.items():
            np.copyto(value, self._store.statistics[name].read())

    def restore(self, names: Iterable[str] | None = None) -> None:
        """Restores the copied statistics: those with these names, or all."""
        for name in self._values if names is None else names:
            self._store.statistics[name].write(self._values[name])


@dataclass(frozen=True)
class Snapshot:
    """Copy of everything that a training step changes.

    Attributes:
        tensors: pairs of a buffer and a copy of its value.
        optimizer: attributes of the optimizer's state by name, e.g. {"learning_rate": 0.001}.
        position: training position of these values.
    """

    tensors: list[tuple[Buffer, Array]]
    optimizer: dict[str, Any]
    position: Position

    @classmethod
    def take(cls, store: Store, position: Position, more: Iterable[Buffer] = ()) -> Snapshot:
        """Copies trainable parameters, statistics, optimizer state and position.

        Args:
            store: tensors of the run.
            position: training position to copy.
            more: additional buffers to copy, e.g. moving averages.
        """
        buffers = [
            *more,
            *(store.parameters[name] for name in store.trainable),
            *store.statistics.values(),
            *(buffer for group in store.moments.values() for buffer in group.values()),
        ]
        return cls(
            # In memory, not in a file: taken every hundred steps, and needed only when training diverges.
            [(buffer, buffer.read().copy()) for buffer in buffers],
            dict(vars(store.optimizer)) if store.optimizer is not None else {},
            _copied(position),
        )

    def restore(self, store: Store) -> Position:
        """Writes all values back to the buffers and the store. Returns a copy of the position."""
        for buffer, value in self.tensors:
            buffer.write(value)
        for key, number in self.optimizer.items():
            setattr(store.optimizer, key, number)
        return _copied(self.position)


def _copied(position: Position) -> Position:
    """Copies a position, so that later steps do not change the copy."""
    history = position.history
    # Only the lists of the history are copied: their entries never change.
    return replace(
        position,
        averages=copy.deepcopy(position.averages),
        history=replace(
            history,
            epochs=list(history.epochs),
            evaluations=list(history.evaluations),
            seconds=list(history.seconds),
            samples_per_second=list(history.samples_per_second),
        ),
    )
