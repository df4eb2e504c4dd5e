"""Defines the base class of sources whose samples have indices: arrays and map-style datasets."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from onnxtrain.runtime.dtypes import Array
from onnxtrain.trainer.data._layout import Layout
from onnxtrain.trainer.data._source import Pass, Worker, count_batches
from onnxtrain.trainer.data._transform import Transform


@dataclass(kw_only=True)
class IndexedSource(ABC):
    """Base class for sources whose samples have indices, and can be shuffled, split, and read starting at any batch.

    Attributes:
        layout: names, dtypes and shapes of the arrays of a batch.
        batch_size: samples per batch.
        drop: True to drop an incomplete last batch.
        weighted: True if the data includes sample weights.
        limit: number of batches per epoch; None for all.
        transform: function that augments the batches; None for no augmentation.
        chosen: indices of the samples that belong to this source; None for all.
    """

    layout: Layout
    batch_size: int
    drop: bool
    weighted: bool = False
    limit: int | None = None
    transform: Transform | None = None
    chosen: Array | None = None

    @abstractmethod
    def _size(self) -> int:
        """Returns the number of samples in the user's data."""

    @abstractmethod
    def first_target(self) -> Array:
        """Returns the values of the model's first target for all samples, [samples, ...]."""

    @abstractmethod
    def sample_weights(self) -> Array | None:
        """Returns the weights of all samples, [samples]; None if there are none."""

    @abstractmethod
    def held_out(self, samples: Array, transform: Transform | None = None) -> Self:
        """Returns a source of validation data.

        Args:
            samples: indices of the samples, [n].
            transform: function that converts the batches, instead of :attr:`transform`; None to leave them unchanged.
        """

    @abstractmethod
    def read(self, epoch: Pass, start: int = 0) -> Iterator[list[Array]]:
        """Yields the batches of an epoch, starting with the batch with index `start`."""

    def last(self) -> list[Array] | None:
        """Returns the incomplete last batch; None if there is none."""
        whole_batches, rest = divmod(self.samples, self.batch_size)
        return next(self.read(Pass(), whole_batches)) if rest else None

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self._size() if self.chosen is None else len(self.chosen)

    @property
    def batches(self) -> int:
        """Number of batches in an epoch."""
        return count_batches(self.samples, self.batch_size, drop=self.drop, limit=self.limit)

    @property
    def volatile(self) -> bool:
        """True if a batch may be overwritten when the next one is read, because a transform created its arrays."""
        return self.transform is not None

    def _places(self, index: int, worker: Worker) -> slice:
        """Returns the slice of the epoch's sample order that contains a worker's share of batch `index`."""
        first = index * self.batch_size
        share = worker.share(min(self.batch_size, self.samples - first))
        return slice(first + share.start, first + share.stop)

    def begin(self, mark: str | None, *, resumed: bool, epochs: int) -> None:  # noqa: B027 nothing to prepare
        """Does nothing: samples can be read in any order."""

    def mark(self) -> None:
        """Returns None: the sample order depends only on the seed and the epoch, so :meth:`begin` needs no state."""
        return

    def take(self, samples: Array) -> Self:
        """Returns a source of the samples with the indices `samples`, without copying."""
        chosen = samples if self.chosen is None else self.chosen[samples]
        return dataclasses.replace(self, chosen=chosen)
