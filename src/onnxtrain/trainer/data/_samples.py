"""Reads map-style datasets: PyTorch's Dataset, Hugging Face datasets, or users' own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxtrain._words import words
from onnxtrain.errors import InputError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.store import require_unmasked
from onnxtrain.trainer.data._arrays import require_batch
from onnxtrain.trainer.data._batch_size import check_batch_size
from onnxtrain.trainer.data._convert import of_tensor
from onnxtrain.trainer.data._held import held
from onnxtrain.trainer.data._indexed import IndexedSource
from onnxtrain.trainer.data._layout import Layout, Raw
from onnxtrain.trainer.data._random import seeded
from onnxtrain.trainer.data._source import STREAM, Options, Pass, order_of
from onnxtrain.trainer.data._tokens import Padding
from onnxtrain.trainer.data._transform import Transform


@dataclass(kw_only=True)
class SampleSource(IndexedSource):
    """Source that reads a map-style dataset: one with `__len__` and `__getitem__`.

    Indices are shuffled as for arrays. Samples have no batch axis; they are stacked into batches. The random generators
    are seeded for each batch, so that random augmentation in `__getitem__` is reproducible.

    Attributes:
        dataset: the user's dataset.
        padding: padding of token sequences; None if all samples have the same shape.
    """

    dataset: Any
    padding: Padding | None = None

    @classmethod
    def open(
        cls,
        layout: Layout,
        dataset: Any,
        options: Options,
        transform: Transform | None,
        padding: Padding | None = None,
    ) -> SampleSource:
        """Opens a dataset and checks its first sample.

        Raises:
            InputError: the dataset is empty, or the sample does not match the model.
        """
        size, fixed = check_batch_size(layout.specs, options.batch_size)
        drop = (fixed and options.training) or options.drop_last
        source = cls(
            layout=layout,
            dataset=dataset,
            batch_size=size,
            drop=drop,
            limit=options.limit,
            transform=transform,
            # Batches of predictions are concatenated, so all sequences must have the same length.
            padding=padding.to_longest(dataset) if padding and layout.predicting else padding,
        )
        if source.samples == 0:
            raise InputError(f"The dataset ({type(dataset).__name__}) has no samples.")
        if options.training:
            require_batch(source.samples, size, drop=drop, fixed=fixed)
        _ = source.batches
        # Reading the first sample must not change the program's random numbers.
        with seeded(0, STREAM):
            # Only one sample: the dataset may be larger than memory. The others are checked batch by batch.
            raw = layout.batch(source._joined(_fetch(dataset, [0])))
        source.weighted = raw.weights is not None
        if source.weighted:
            source.layout = layout.with_weights()
        if transform is None:
            source.layout.convert(raw)
        return source

    def _size(self) -> int:
        return len(self.dataset)

    def _joined(self, samples: list[Any], indices: Sequence[int] = ()) -> Any:
        """Combines samples into a batch; `indices` are their indices, for error messages."""
        return self.padding.batch(samples, indices) if self.padding else collate(samples, indices)

    def read(self, epoch: Pass, start: int = 0) -> Iterator[list[Array]]:
        """Yields the batches of an epoch, starting with the batch with index `start`."""
        order = order_of(self.samples, epoch)
        if self.chosen is not None:
            order = self.chosen[order]
        for index in range(start, self.batches):
            part = order[self._places(index, epoch.worker)].tolist()
            yield self._batch(part, epoch, index) if part else []

    def _batch(self, indices: list[int], epoch: Pass, index: int) -> list[Array]:
        # Seeded per batch, not per epoch, because a resumed epoch starts in the middle.
        with seeded(*epoch.worker.key(epoch.seed, STREAM, epoch.epoch, index)):
            samples = _fetch(self.dataset, indices)
        try:
            raw = self.layout.batch(self._joined(samples, indices))
            if self.transform is not None:
                raw = self.transform(self.layout, self.layout.arrays(raw), epoch, index)
            return self.layout.convert(raw)
        except InputError as error:
            raise InputError(f"{epoch.place(index)} (samples {_shown(indices)}): {error}") from error

    def first_target(self) -> Array:
        """Reads all samples once, and returns their values of the model's first target, [samples, ...]."""
        targets = [np.asarray(raw.targets[0]) for raw in self._raw_batches()]
        return np.concatenate(targets)

    def sample_weights(self) -> Array | None:
        """Reads all samples once, and returns their weights; returns None if there are none."""
        if not self.weighted:
            return None
        return np.concatenate([np.asarray(raw.weights) for raw in self._raw_batches()])

    def _raw_batches(self) -> Iterator[Raw]:
        """Yields all samples in batches, in order and without augmenting the batches."""
        order = np.arange(self._size()) if self.chosen is None else self.chosen
        for first in range(0, len(order), self.batch_size):
            indices = order[first : first + self.batch_size].tolist()
            # Reading labels must not change the program's random numbers.
            with seeded(0, STREAM):
                samples = _fetch(self.dataset, indices)
            yield self.layout.arrays(self.layout.batch(self._joined(samples, indices)))

    def held_out(self, samples: Array, transform: Transform | None = None) -> SampleSource:
        """Returns a source of validation data.

        Args:
            samples: indices of the samples, [n].
            transform: function that converts the batches, instead of :attr:`transform`; None to leave them unchanged.
        """
        if self.transform is not None and transform is None:
            # Without the transform, the samples themselves must fit; one of them is checked, as in `open`.
            try:
                with seeded(0, STREAM):
                    first = _fetch(
                        self.dataset, [int(samples[0] if self.chosen is None else self.chosen[samples[0]])]
                    )
                self.layout.convert(self.layout.batch(self._joined(first)))
            except InputError as error:
                raise InputError(
                    f"Validation data: {error}{words().untransformed('validation_transform')}"
                ) from error
        return dataclasses.replace(self.take(samples), drop=False, limit=None, transform=transform)


def _fetch(dataset: Any, indices: list[int]) -> list[Any]:
    """Fetches samples by index, in a single call if the dataset has PyTorch's optional `__getitems__`."""
    together = getattr(dataset, "__getitems__", None)
    if callable(together):
        return list(together(indices))
    # Copied, because a dataset may reuse one buffer; the last sample is stacked before the next read.
    return [*(held(dataset[index]) for index in indices[:-1]), dataset[indices[-1]]]


def _shown(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices[:4])) + (", ..." if len(indices) > 4 else "")


def collate(samples: Sequence[Any], indices: Sequence[int] = ()) -> Any:
    """Stacks samples into a batch. If a sample is a tuple or dict, the batch is a tuple or dict of arrays.

    Args:
        samples: the samples.
        indices: their indices in the dataset, for error messages; empty to count from 0.

    >>> collate([(np.zeros(2), 1), (np.ones(2), 0)])
    (array([[0., 0.],
           [1., 1.]]), array([1, 0]))

    Raises:
        InputError: the samples differ in shape or kind.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        ragged = [
            sample for sample in samples if not isinstance(sample, Mapping) or sample.keys() != first.keys()
        ]
        if ragged:
            raise InputError("samples have different keys; all must be dicts with the same keys.")
        return {name: collate([sample[name] for sample in samples], indices) for name in first}
    if isinstance(first, tuple) or (isinstance(first, list) and any(hasattr(e, "__array__") for e in first)):
        if any(not isinstance(sample, tuple | list) or len(sample) != len(first) for sample in samples):
            raise InputError(f"samples have different numbers of entries; the first has {len(first)}.")
        return tuple(collate(list(part), indices) for part in zip(*samples, strict=True))
    if isinstance(first, str | bytes):
        # Strings are allowed here; the layout rejects them for inputs of the model, and ignores them otherwise.
        return np.asarray(samples)
    for place, sample in enumerate(samples):
        require_unmasked(f"sample {indices[place] if indices else place}", sample)
    arrays = [np.asarray(of_tensor(sample)) for sample in samples]
    for place, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            other = indices[place] if indices else place
            raise InputError(
                f"sample {other} has shape {list(array.shape)}, and sample {indices[0] if indices else 0} has "
                f"{list(arrays[0].shape)}: they cannot be stacked. Pad them to one size, or pass a "
                "torch.utils.data.DataLoader whose collate_fn does."
            )
    return np.stack(arrays)
