"""Defines `Source`, the interface through which training, evaluation and prediction read data."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from onnxtrain._words import argument
from onnxtrain.errors import InputError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.trainer.data._layout import Layout

# Each use of the trainer's seed has its own number, so that shuffling and augmentation are independent.
SHUFFLE, SPLIT, TRANSFORM, STREAM, IMAGES = 0, 1, 2, 3, 4


class Worker(NamedTuple):
    """One of the workers among which the samples of each batch are divided.

    Attributes:
        rank: rank of the worker, counted from 0.
        size: number of workers.
    """

    rank: int = 0
    size: int = 1

    def share(self, samples: int) -> slice:
        """Returns this worker's slice of a batch.

        If the number of samples is not divisible by the number of workers, the first workers get one extra sample each.

        >>> [Worker(rank, 3).share(8) for rank in range(3)]
        [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None)]
        """
        even, rest = divmod(samples, self.size)
        start = self.rank * even + min(self.rank, rest)
        return slice(start, start + even + (self.rank < rest))

    def key(self, *numbers: int) -> tuple[int, ...]:
        """Returns a seed for this worker: `numbers` and the rank, so that workers draw different random numbers.

        For rank 0, the seed is `numbers` alone, as in a single process.
        """
        return (*numbers, self.rank) if self.rank else numbers


class Pass(NamedTuple):
    """One pass over the data: its seed and options.

    Attributes:
        seed: seed of the trainer.
        epoch: number of epochs finished over all fits.
        fit_start: number of epochs finished when the fit began.
        shuffle: True to shuffle the samples.
        training: True for training, False for evaluation.
        worker: worker that reads the data. It gets its share of each batch, or an empty list if its share has no
            samples.
    """

    seed: int = 0
    epoch: int = 0
    fit_start: int = 0
    shuffle: bool = False
    training: bool = False
    worker: Worker = Worker()

    def place(self, batch: int) -> str:
        """Returns the position of a batch for error messages, e.g. "Batch 3 of epoch 2"."""
        return f"Batch {batch + 1} of epoch {self.epoch + 1}" if self.training else f"Batch {batch + 1}"


class Source(Protocol):
    """Interface for reading a dataset in batches, which are checked and cast to the model's dtypes.

    Attributes:
        layout: names, dtypes and shapes of the arrays of a batch.
        weighted: True if the data includes a weight for each sample.
        samples: number of samples; None for a stream.
        batch_size: samples per batch; None if the data consists of batches.
        batches: number of batches per epoch; None if unknown before the stream ends.
        volatile: True if a batch may be overwritten when the next one is read, because a stream or a transform reuses
            its buffer. Copy batches to keep them.
    """

    layout: Layout

    @property
    def weighted(self) -> bool: ...

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
            mark: text returned by :meth:`mark` before the interruption, in a resumed fit; None in a new fit.
            resumed: True if an interrupted fit is resumed.
            epochs: number of epochs of the fit.

        Raises:
            InputError: the source cannot return to where training stopped, or cannot be read repeatedly.
        """

    def mark(self) -> str | None:
        """Returns the state that :meth:`begin` needs to repeat the current epoch in a resumed fit.

        The trainer saves this state with the run.

        Returns:
            The states of a stream's random generators at the start of the epoch, as text; None if the order of the
            samples depends only on the seed and the epoch.
        """

    def last(self) -> list[Array] | None:
        """Returns the incomplete last batch; None if there is none, or the data is a stream."""

    def read(self, epoch: Pass, start: int = 0) -> Iterator[list[Array]]:
        """Yields the batches of an epoch, starting with batch `start`, as arrays in the model's order.

        Raises:
            InputError: a batch does not match the model, or there is no batch.
        """


class Options(NamedTuple):
    """Options for reading a dataset in batches.

    Attributes:
        batch_size: samples per batch; None for the default.
        training: True for training data: incomplete batches are dropped if the model has a fixed batch size.
        drop_last: True to drop an incomplete last batch.
        limit: number of batches per epoch; None for all.
    """

    batch_size: int | None = None
    training: bool = False
    drop_last: bool = False
    limit: int | None = None


def order_of(samples: int, epoch: Pass) -> Array:
    """Returns the sample order of an epoch, int64 [samples]; it depends only on the arguments."""
    if not epoch.shuffle:
        return np.arange(samples)
    # No generator state to save: the order of any epoch can be drawn again.
    return np.random.default_rng([epoch.seed, SHUFFLE, epoch.epoch]).permutation(samples)


def count_batches(samples: int, size: int, *, drop: bool, limit: int | None) -> int:
    """Returns the number of batches per epoch.

    Args:
        samples: number of samples.
        size: batch size.
        drop: True if an incomplete last batch is dropped.
        limit: number of batches that the user asked for; None for all.

    Raises:
        InputError: there are fewer batches than the limit.
    """
    batches = samples // size if drop else -(-samples // size)
    if limit is not None and limit > batches:
        raise InputError(
            f"{argument('steps_per_epoch')} asks for {limit} batches, but {samples} samples make only "
            f"{batches} of {size}. Lower it, or leave it out."
        )
    return batches if limit is None else limit


def own_batches(data: Source, worker: Worker) -> Iterator[list[Array]]:
    """Yields the batches that a worker evaluates: with n workers, worker r gets batches r, r + n, r + 2n, ...

    Batches are not split between workers, so results are the same as in a single process.
    """
    # Images are decoded ahead, which a pass per batch would prevent.
    if (read_own := getattr(data, "read_own", None)) is not None:
        yield from read_own(worker)
        return
    # All workers read the whole stream, whose length is unknown before it ends.
    if data.samples is None or data.batches is None:
        yield from islice(data.read(Pass()), worker.rank, None, worker.size)
        return
    # Indexed samples can be read from any batch, so each worker reads only its own.
    for index in range(worker.rank, data.batches, worker.size):
        yield from islice(data.read(Pass(), index), 1)
