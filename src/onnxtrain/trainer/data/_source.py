"""Defines `Source`, the interface by which training, evaluation and prediction read data."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from onnxtrain._words import argument
from onnxtrain.errors import InputError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.trainer.data._layout import Layout

# Each use of the trainer's seed has a number of its own: shuffling and augmentation of one epoch are independent.
SHUFFLE, SPLIT, TRANSFORM, STREAM = 0, 1, 2, 3


class Worker(NamedTuple):
    """One of the workers that share the samples of each batch.

    Attributes:
        rank: number of the worker, counted from 0.
        size: number of workers.
    """

    rank: int = 0
    size: int = 1

    def share(self, samples: int) -> slice:
        """Cuts a batch into one share per worker; the first workers have one sample more if it does not come out even.

        >>> [Worker(rank, 3).share(8) for rank in range(3)]
        [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None)]
        """
        even, rest = divmod(samples, self.size)
        start = self.rank * even + min(self.rank, rest)
        return slice(start, start + even + (self.rank < rest))

    def key(self, *numbers: int) -> tuple[int, ...]:
        """Appends the worker to the key of random numbers: worker 0 draws those of one process, others draw others."""
        return (*numbers, self.rank) if self.rank else numbers


class Pass(NamedTuple):
    """One epoch: the numbers from which the order of its samples and its random numbers derive.

    Attributes:
        seed: seed of the trainer.
        epoch: number of epochs finished over the life of the trainer.
        fit_start: number of epochs finished when the fit began.
        shuffle: True for a random order of the samples.
        training: True if the epoch is trained on.
        worker: the worker that reads; it gets its share of each batch, an empty list if that has no samples.
    """

    seed: int = 0
    epoch: int = 0
    fit_start: int = 0
    shuffle: bool = False
    training: bool = False
    worker: Worker = Worker()

    def place(self, batch: int) -> str:
        """Names the place of a batch for messages, e.g. "Batch 3 of epoch 2"."""
        return f"Batch {batch + 1} of epoch {self.epoch + 1}" if self.training else f"Batch {batch + 1}"


class Source(Protocol):
    """Batches of a data set, checked and in the model's dtypes.

    Attributes:
        layout: names, dtypes and shapes of the arrays of a batch.
        weighted: True if the data brings a weight for each sample.
        samples: number of samples; None for a stream.
        batch_size: samples per batch; None if the data comes in batches.
        batches: number of batches per epoch; None if only the end of the stream tells.
        volatile: True if the next batch may be written to the memory of this one, as streams and transforms do that
            fill one buffer again and again.
    """

    layout: Layout
    weighted: bool

    @property
    def samples(self) -> int | None: ...

    @property
    def batch_size(self) -> int | None: ...

    @property
    def batches(self) -> int | None: ...

    @property
    def volatile(self) -> bool: ...

    def begin(self, mark: str | None, *, resumed: bool, epochs: int) -> None:
        """Prepares for a fit.

        Args:
            mark: result of :meth:`mark` in the fit that goes on; None for a new one.
            resumed: True if an interrupted fit goes on.
            epochs: number of epochs to come.

        Raises:
            InputError: The source cannot go to where training stopped, or cannot be read so often.
        """

    def mark(self) -> str | None:
        """Returns a text that :meth:`begin` needs to read the epoch under way again; None if its number suffices."""

    def last(self) -> list[Array] | None:
        """Reads the incomplete last batch, if samples are counted and there is one."""

    def read(self, epoch: Pass, start: int = 0) -> Iterator[list[Array]]:
        """Yields the batches of an epoch from number `start` on, arrays in the model's order.

        Raises:
            InputError: A batch does not fit the model, or there is no batch.
        """


class Options(NamedTuple):
    """Options of reading.

    Attributes:
        batch_size: samples per batch; None for the default.
        training: True to train on the data: a model with a fixed batch then gets whole batches only.
        drop_last: True to leave out an incomplete last batch.
        limit: number of batches per epoch; None for all.
    """

    batch_size: int | None = None
    training: bool = False
    drop_last: bool = False
    limit: int | None = None


def order_of(samples: int, epoch: Pass) -> Array:
    """Draws the order of the samples in an epoch; it depends on the arguments alone."""
    if not epoch.shuffle:
        return np.arange(samples)
    # Drawn from numbers alone, with no generator to save: any epoch's order can be drawn again.
    return np.random.default_rng([epoch.seed, SHUFFLE, epoch.epoch]).permutation(samples)


def count_batches(samples: int, size: int, *, drop: bool, limit: int | None) -> int:
    """Counts the batches of an epoch. Raises InputError: there are fewer batches than the limit."""
    batches = samples // size if drop else -(-samples // size)
    if limit is not None and limit > batches:
        raise InputError(
            f"{argument('steps_per_epoch')} asks for {limit} batches, and {samples} samples make {batches} of {size}. "
            "Lower it, or leave it out."
        )
    return batches if limit is None else limit


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
