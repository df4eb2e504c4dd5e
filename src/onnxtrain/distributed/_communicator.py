"""Defines `Communicator`, through which the workers of a group exchange arrays and objects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from onnxtrain.runtime.dtypes import Array


class Communicator(ABC):
    """Exchanges arrays and objects between the workers of a group.

    Except for :meth:`move`, all workers must call the same methods in the same order.

    Attributes:
        rank: rank of this worker, 0 .. size - 1. Worker 0 writes the files and shows progress.
        size: number of workers.

    Raises:
        WorkersError: raised by every method if another worker has exited or does not respond in time.
    """

    rank: int
    size: int

    @abstractmethod
    def sum(self, arrays: Sequence[Array], bucket_bytes: int = 2**20, *, compressed: bool = False) -> None:
        """All-reduces the arrays: replaces each with its sum over all workers, in place.

        Args:
            arrays: C-contiguous arrays of float32, float64 or int64, with the same shapes on all workers.
            bucket_bytes: size of the buckets in which small arrays are sent together.
            compressed: True to send floating-point arrays as bfloat16.
        """

    @abstractmethod
    def broadcast(self, arrays: Sequence[Array], root: int = 0) -> None:
        """Broadcasts arrays from worker `root` to all workers, in place. The arrays are C-contiguous, of any dtype."""

    @abstractmethod
    def move(self, array: Array, source: int, target: int) -> None:
        """Copies an array from worker `source` to worker `target`; other workers need not call this method.

        Args:
            array: a C-contiguous array of any dtype, with the same dtype and shape on both workers. On `target`, it is
                overwritten in place.
            source: rank of the sender.
            target: rank of the receiver. If it equals `source`, nothing is sent.
        """

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """All-gathers objects: returns the `value` of each worker, in rank order, to every worker."""

    @abstractmethod
    def share(self, value: Any = None) -> Any:
        """Broadcasts an object: returns worker 0's `value` to every worker, and ignores the values of other workers."""


class Solo(Communicator):
    """A group with a single worker, for programs that run as a single process."""

    rank = 0
    size = 1

    def sum(self, arrays: Sequence[Array], bucket_bytes: int = 2**20, *, compressed: bool = False) -> None:
        """Does nothing."""

    def broadcast(self, arrays: Sequence[Array], root: int = 0) -> None:
        """Does nothing."""

    def move(self, array: Array, source: int, target: int) -> None:
        """Does nothing."""

    def gather(self, value: Any) -> list[Any]:
        """Returns a list that contains only `value`."""
        return [value]

    def share(self, value: Any = None) -> Any:
        """Returns `value`."""
        return value
