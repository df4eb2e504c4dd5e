"""Data sets that give one sample for an index: PyTorch's map-style Dataset, Hugging Face datasets, your own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxtrain.errors import InputError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.trainer.data._arrays import require_batch
from onnxtrain.trainer.data._batch_size import check_batch_size
from onnxtrain.trainer.data._layout import Layout
from onnxtrain.trainer.data._random import seeded
from onnxtrain.trainer.data._source import STREAM, Options, Pass, count_batches, order_of
from onnxtrain.trainer.data._transform import Transform


@dataclass
class SampleSource:
    """A data set with `__len__` and `__getitem__`; a sample is what a batch is, without the axis of samples.

    Batches are put together by the trainer, which shuffles as it does with arrays. Random numbers that samples are
    augmented with are those of the batch.

    Attributes:
        layout: what the arrays of a batch are.
        dataset: gives samples.
        batch_size: samples per step.
        drop: whether an incomplete last batch is left out.
        weighted: whether samples come with weights.
        limit: batches of an epoch; None for all there are.
        transform: augmentation of batches.
        chosen: the samples that belong to the data set; None for all.
    """

    layout: Layout
    dataset: Any
    batch_size: int
    drop: bool
    weighted: bool = False
    limit: int | None = None
    transform: Transform | None = None
    chosen: Array | None = None

    @classmethod
    def open(
        cls, layout: Layout, dataset: Any, options: Options, transform: Transform | None
    ) -> SampleSource:
        """Returns the source of a data set, whose first sample is looked at.

        Raises:
            InputError: There is none, or it does not fit.
        """
        size, fixed = check_batch_size(layout.specs, options.batch_size)
        drop = (fixed and options.training) or options.drop_last
        source = cls(layout, dataset, size, drop, limit=options.limit, transform=transform)
        if source.samples == 0:
            raise InputError(f"The data set ({type(dataset).__name__}) has no samples.")
        if options.training:
            require_batch(source.samples, size, drop=drop, fixed=fixed)
        _ = source.batches
        with seeded(0, STREAM):
            raw = layout.batch(collate(_fetch(dataset, [0])))
        source.weighted = raw.weights is not None
        if source.weighted:
            source.layout = layout.with_weights()
        if transform is None:
            source.layout.convert(raw)
        return source

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.dataset) if self.chosen is None else len(self.chosen)

    @property
    def batches(self) -> int:
        """Number of batches in an epoch."""
        return count_batches(self.samples, self.batch_size, drop=self.drop, limit=self.limit)

    def begin(self, mark: str | None, *, resumed: bool, epochs: int) -> None:
        """Does nothing: samples can be read from anywhere."""

    def mark(self) -> None:
        """Nothing needs to be kept."""
        return

    def read(self, epoch: Pass, start: int = 0) -> Iterator[list[Array]]:
        """Yields the batches of an epoch."""
        order = order_of(self.samples, epoch)
        if self.chosen is not None:
            order = self.chosen[order]
        for index in range(start, self.batches):
            part = order[index * self.batch_size : (index + 1) * self.batch_size]
            yield self._batch(part.tolist(), epoch, index)

    def _batch(self, indices: list[int], epoch: Pass, index: int) -> list[Array]:
        with seeded(epoch.seed, STREAM, epoch.epoch, index):
            samples = _fetch(self.dataset, indices)
        try:
            raw = self.layout.batch(collate(samples, indices))
            if self.transform is not None:
                raw = self.transform(self.layout, self.layout.arrays(raw), epoch, index)
            return self.layout.convert(raw)
        except InputError as error:
            raise InputError(f"{epoch.place(index)} (samples {_shown(indices)}): {error}") from error

    def last(self) -> list[Array] | None:
        """Returns the incomplete last batch, if there is one."""
        whole = self.samples // self.batch_size
        if whole * self.batch_size == self.samples:
            return None
        return next(self.read(Pass(), whole))

    def take(self, samples: Array) -> SampleSource:
        """Returns the data set of some samples."""
        chosen = samples if self.chosen is None else self.chosen[samples]
        return dataclasses.replace(self, chosen=chosen)

    def held_out(self, samples: Array) -> SampleSource:
        """Returns the data set of some samples to evaluate on."""
        return dataclasses.replace(self.take(samples), drop=False, limit=None, transform=None)


def _fetch(dataset: Any, indices: list[int]) -> list[Any]:
    """Returns samples; together where the data set can, as PyTorch and Hugging Face agree on it."""
    together = getattr(dataset, "__getitems__", None)
    return list(together(indices)) if callable(together) else [dataset[index] for index in indices]


def _shown(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices[:4])) + (", ..." if len(indices) > 4 else "")


def collate(samples: Sequence[Any], indices: Sequence[int] = ()) -> Any:
    """Returns samples as one batch: a tuple or a dict like theirs, of stacked arrays.

    >>> collate([(np.zeros(2), 1), (np.ones(2), 0)])
    (array([[0., 0.],
           [1., 1.]]), array([1, 0]))

    Raises:
        InputError: They are of different shapes or kinds.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        ragged = [
            sample for sample in samples if not isinstance(sample, Mapping) or sample.keys() != first.keys()
        ]
        if ragged:
            raise InputError("samples have different names; all must be dicts with the same keys.")
        return {name: collate([sample[name] for sample in samples], indices) for name in first}
    if isinstance(first, tuple) or (isinstance(first, list) and any(hasattr(e, "__array__") for e in first)):
        if any(not isinstance(sample, tuple | list) or len(sample) != len(first) for sample in samples):
            raise InputError(f"samples have different numbers of entries; the first has {len(first)}.")
        return tuple(collate(list(part), indices) for part in zip(*samples, strict=True))
    if isinstance(first, str | bytes):
        return np.asarray(samples)  # refused where the model does not take it
    arrays = [
        np.asarray(sample.detach().cpu() if hasattr(sample, "detach") else sample) for sample in samples
    ]
    for place, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            other = indices[place] if indices else place
            raise InputError(
                f"sample {other} has shape {list(array.shape)}, and sample {indices[0] if indices else 0} has "
                f"{list(arrays[0].shape)}: they cannot be stacked. Pad them to one size, or pass a "
                "torch.utils.data.DataLoader whose collate_fn does."
            )
    return np.stack(arrays)
