"""Copies the training state in memory, so that training can go back when it diverges."""

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

# Elements per block of a sum: for longer vectors BLAS wakes threads of its own, which compete with ONNX Runtime's.
_BLOCK = 8192


def all_finite(buffer: Buffer | RowGradient) -> bool:
    """Checks that a floating-point buffer holds neither NaN nor infinity."""
    flat = buffer.read().reshape(-1)
    # The buffer holds raw bits; an exponent of all ones is NaN or infinity.
    if buffer.dtype.name == "bfloat16":
        return not ((flat & _BFLOAT16_EXPONENT) == _BFLOAT16_EXPONENT).any()
    # One pass without a temporary array settles nearly every case; an overflowing sum settles nothing.
    with np.errstate(over="ignore", invalid="ignore"):
        quick = np.add.reduce(flat)
    return bool(np.isfinite(quick)) or bool(np.isfinite(flat).all())


def finite_parameters(store: Store) -> bool:
    """Checks that all trainable parameters are finite."""
    return all(all_finite(store.parameters[name]) for name in store.trainable)


def not_finite(store: Store) -> str | None:
    """Returns what an update has made NaN or infinite, e.g. "parameters"; None if all values are finite."""
    if not finite_parameters(store):
        return "parameters"
    moments = (buffer for group in store.moments.values() for buffer in group.values())
    return None if all(map(all_finite, moments)) else "running means of the optimizer"


class FiniteCheck:
    """Checks tensors for NaN and infinity, step after step.

    Args:
        buffers: floating-point tensors. Views of those on the CPU are made once, as their memory does not move.
    """

    def __init__(self, buffers: Iterable[Buffer | RowGradient]) -> None:
        listed = list(buffers)
        # Half precision overflows in sums of squares, device memory has to be copied, and rows change their size:
        # those are checked one by one.
        direct = {"float32", "float64"}
        self._others = [
            b
            for b in listed
            if b.device.type != "cpu" or b.dtype.name not in direct or isinstance(b, RowGradient)
        ]
        # `read` gives the memory itself on the CPU: the views stay valid, as a fit does not move its tensors.
        flat = [b.read().reshape(-1) for b in listed if all(b is not other for other in self._others)]
        self._flat = flat
        small = [array for array in flat if array.size <= _BLOCK]
        # Small ones are gathered first: a call costs more than copying them.
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
        # A sum of squares is NaN or infinite if an element is; finite elements can overflow it, which the second
        # check tells.
        total = sum(float(np.vdot(block, block)) for block in self._blocks)
        finite = math.isfinite(total) or all(np.isfinite(array).all() for array in self._flat)
        return finite and all(map(all_finite, self._others))


class StatisticsBackup:
    """Keeps the BatchNorm statistics of before a step.

    The training model updates them together with the loss, so they have changed before the loss can be checked.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._values = {name: np.empty_like(buffer.read()) for name, buffer in store.statistics.items()}

    def take(self) -> None:
        """Copies the statistics."""
        for name, value in self._values.items():
            np.copyto(value, self._store.statistics[name].read())

    def restore(self) -> None:
        """Puts the copied statistics back."""
        for name, value in self._values.items():
            self._store.statistics[name].write(value)


@dataclass(frozen=True)
class Snapshot:
    """Copy of everything that a training step changes.

    Attributes:
        tensors: each buffer with the value to write back.
        optimizer: attributes of the optimizer's state by name, e.g. {"learning_rate": 0.001}.
        position: position that the values belong to.
    """

    tensors: list[tuple[Buffer, Array]]
    optimizer: dict[str, Any]
    position: Position

    @classmethod
    def take(cls, store: Store, position: Position, more: Iterable[Buffer] = ()) -> Snapshot:
        """Copies trainable parameters, statistics, moments, optimizer progress and position.

        `more` are further buffers that change with them, e.g. moving averages.
        """
        buffers = [
            *more,
            *(store.parameters[name] for name in store.trainable),
            *store.statistics.values(),
            *(buffer for group in store.moments.values() for buffer in group.values()),
        ]
        return cls(
            # In place of a file: a snapshot is taken every hundred steps and needed only when training diverges.
            [(buffer, buffer.read().copy()) for buffer in buffers],
            dict(vars(store.optimizer)) if store.optimizer is not None else {},
            _copied(position),
        )

    def restore(self, store: Store) -> Position:
        """Puts everything back in place and returns the position."""
        for buffer, value in self.tensors:
            buffer.write(value)
        for key, number in self.optimizer.items():
            setattr(store.optimizer, key, number)
        return _copied(self.position)


def _copied(position: Position) -> Position:
    """Copies a position so that further steps do not change the copy; entries of the history are never changed."""
    history = position.history
    # The history's lists are copied, their entries are not: no entry changes once it is there.
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
