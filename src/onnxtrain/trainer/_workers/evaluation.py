"""Shares the batches of an evaluation among the workers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from onnxtrain.runtime.dtypes import Array
from onnxtrain.trainer.data import Pass, Source, Worker


def own_batches(data: Source, worker: Worker) -> Iterator[list[Array]]:
    """Yields the batches that a worker evaluates: of n workers, worker r has the batches r, r + n, r + 2n, ...

    Batches stay whole, so that each is computed as by one process.
    """
    # A stream is read by all workers. Its end alone tells the number of its batches.
    if data.samples is None or data.batches is None:
        yield from islice(data.read(Pass()), worker.rank, None, worker.size)
        return
    # Samples with numbers are read from any batch on, so that no worker reads those of the others.
    for index in range(worker.rank, data.batches, worker.size):
        yield from islice(data.read(Pass(), index), 1)
