"""Copies of the training state in memory, to go back to when training diverges."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.store import Buffer, Store
from onnxtrain.trainer._position import Position

__all__ = [
    "Snapshot",
    "StatisticsBackup",
    "all_finite",
    "finite_gradients",
    "finite_parameters",
    "finite_statistics",
]

_BFLOAT16_EXPONENT = np.uint16(0x7F80)


def all_finite(buffer: Buffer) -> bool:
    """Returns whether a floating-point buffer holds neither NaN nor infinity."""
    flat = buffer.read().reshape(-1)
    if buffer.dtype.name == "bfloat16":  # raw bits; an exponent of all ones is NaN or infinity
        return not ((flat & _BFLOAT16_EXPONENT) == _BFLOAT16_EXPONENT).any()
    # One pass without a temporary array settles nearly every case; an overflowing sum settles nothing.
    with np.errstate(over="ignore", invalid="ignore"):
        quick = flat.dot(flat) if flat.dtype != np.float16 else flat.sum()
    return bool(np.isfinite(quick)) or bool(np.isfinite(flat).all())


def finite_gradients(store: Store) -> bool:
    """Returns whether all gradients are finite."""
    return all(all_finite(buffer) for buffer in store.gradients.values())


def finite_parameters(store: Store) -> bool:
    """Returns whether all trainable parameters are finite."""
    return all(all_finite(store.parameters[name]) for name in store.trainable)


def finite_statistics(store: Store) -> bool:
    """Returns whether all BatchNorm statistics are finite."""
    return all(all_finite(buffer) for buffer in store.statistics.values())


class StatisticsBackup:
    """The BatchNorm statistics before a step, which has changed them when its loss can be looked at."""

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
    """A copy of everything that a training step changes, and the position it belongs to."""

    tensors: list[tuple[Buffer, Array]]
    optimizer: dict[str, Any]
    position: Position

    @classmethod
    def take(cls, store: Store, position: Position, more: Iterable[Buffer] = ()) -> Snapshot:
        """Returns a copy of trainable parameters, statistics, moments, optimizer progress and position.

        `more` are further buffers that change with them.
        """
        buffers = [
            *more,
            *(store.parameters[name] for name in store.trainable),
            *store.statistics.values(),
            *(buffer for group in store.moments.values() for buffer in group.values()),
        ]
        return cls(
            [(buffer, buffer.read().copy()) for buffer in buffers],
            dict(vars(store.optimizer)) if store.optimizer is not None else {},
            copy.deepcopy(position),
        )

    def restore(self, store: Store) -> Position:
        """Puts everything back in place and returns the position."""
        for buffer, value in self.tensors:
            buffer.write(value)
        for key, number in self.optimizer.items():
            setattr(store.optimizer, key, number)
        return copy.deepcopy(self.position)
