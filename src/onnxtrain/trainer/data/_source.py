"""Where batches come from: what the training loop, evaluation and prediction know of data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from onnxtrain.errors import InputError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.trainer.data._layout import Layout

# Streams of random numbers that derive from the trainer's seed.
SHUFFLE, SPLIT, TRANSFORM, STREAM = 0, 1, 2, 3


class Pass(NamedTuple):
    """One epoch: all that the order of its samples and its random numbers derive from.

    Attributes:
        seed: the trainer's.
        epoch: finished epochs over the life of the trainer.
        fit_start: those that were finished when the fit began.
        shuffle: whether samples come in a random order.
        training: whether it is trained on.
    """

    seed: int = 0
    epoch: int = 0
    fit_start: int = 0
    shuffle: bool = False
    training: bool = False

    def place(self, batch: int) -> str:
        """Returns where a batch is, for messages."""
        return f"Batch {batch + 1} of epoch {self.epoch + 1}" if self.training else f"Batch {batch + 1}"


class Source(Protocol):
    """Batches of a data set, checked and of the model's dtypes.

    Attributes:
        layout: what the arrays of a batch are.
        weighted: whether the data brings a weight for each sample.
        samples: samples of a pass over all data; None where only its end tells.
        batch_size: samples per batch; None where they come in batches.
        batches: batches of an epoch; None where only its end tells.
    """

    layout: Layout
    weighted: bool

    @property
    def samples(self) -> int | None: ...

    @property
    def batch_size(self) -> int | None: ...

    @property
    def batches(self) -> int | None: ...

    def begin(self, mark: str | None, *, resumed: bool, epochs: int) -> None:
        """Makes ready for a fit.

        Args:
            mark: what :meth:`mark` gave, should the fit go on with one that was cut off.
            resumed: whether it does.
            epochs: how many there will be.

        Raises:
            InputError: This source cannot be taken to where training stopped, or read so often.
        """

    def mark(self) -> str | None:
        """Returns what :meth:`begin` needs to read the epoch under way again, beside its number; for JSON."""

    def last(self) -> list[Array] | None:
        """Returns the incomplete last batch, where samples are told apart and there is one."""

    def read(self, epoch: Pass, start: int = 0) -> Iterator[list[Array]]:
        """Yields the batches of an epoch from number `start` on, in the model's order of arguments.

        Raises:
            InputError: A batch does not fit the model, or there is none.
        """


class Options(NamedTuple):
    """How data is to be read.

    Attributes:
        batch_size: samples per batch, as asked for.
        training: whether it is to be trained on: in whole batches only where the model's batch is fixed.
        drop_last: whether an incomplete last batch is left out.
        limit: batches of an epoch; None for all there are.
    """

    batch_size: int | None = None
    training: bool = False
    drop_last: bool = False
    limit: int | None = None


def order_of(samples: int, epoch: Pass) -> Array:
    """Returns the order of the samples in an epoch; it depends on nothing but the arguments."""
    if not epoch.shuffle:
        return np.arange(samples)
    return np.random.default_rng([epoch.seed, SHUFFLE, epoch.epoch]).permutation(samples)


def count_batches(samples: int, size: int, *, drop: bool, limit: int | None) -> int:
    """Returns the number of batches in an epoch over samples that are told apart.

    Raises:
        InputError: There are fewer than asked for.
    """
    batches = samples // size if drop else -(-samples // size)
    if limit is not None and limit > batches:
        raise InputError(
            f"steps_per_epoch asks for {limit} batches, and {samples} samples make {batches} of {size}. Lower it, or "
            "leave it out."
        )
    return batches if limit is None else limit
