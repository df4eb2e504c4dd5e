"""Defines `Communicator`, by which the workers of a group exchange arrays and objects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from onnxtrain.runtime.dtypes import Array


class Communicator(ABC):
    """Connects the workers of a group. All workers call the same methods in the same order.

    Attributes:
        rank: number of this worker, 0 .. size - 1. Worker 0 leads: it writes the files and shows the progress.
        size: number of workers.

    Raises:
        WorkersError: of every method: another worker has ended, or did not answer in time.
    """

    rank: int
    size: int

    @abstractmethod
    def sum(self, arrays: Sequence[Array], bucket_bytes: int = 2**20, *, compressed: bool = False) -> None:
        """Replaces each array by its sum over all workers, in place.

        Args:
            arrays: C-contiguous arrays of float32, float64 or int64, of equal shapes on all workers.
            bucket_bytes: size of the pieces in which small arrays are sent together.
            compressed: send floating-point arrays as bfloat16.
        """

    @abstractmethod
    def broadcast(self, arrays: Sequence[Array], root: int = 0) -> None:
        """Replaces each array by that of the worker `root`, in place; arrays are C-contiguous, of any dtype."""

    @abstractmethod
    def move(self, array: Array, source: int, target: int) -> None:
        """Replaces the array of the worker `target` by that of `source`; other workers need not call it."""

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Returns the objects of all workers in their order, to each worker."""

    @abstractmethod
    def share(self, value: Any = None) -> Any:
        """Returns the object of worker 0 to each worker; those of the others are ignored."""


class Solo(Communicator):
    """A group of one worker, for programs that were started without others."""

    rank = 0
    size = 1

    def sum(self, arrays: Sequence[Array], bucket_bytes: int = 2**20, *, compressed: bool = False) -> None:
        """Leaves the arrays as they are."""

    def broadcast(self, arrays: Sequence[Array], root: int = 0) -> None:
        """Leaves the arrays as they are."""

    def move(self, array: Array, source: int, target: int) -> None:
        """Leaves the array as it is."""

    def gather(self, value: Any) -> list[Any]:
        """Returns the object in a list."""
        return [value]

    def share(self, value: Any = None) -> Any:
        """Returns the object."""
        return value
