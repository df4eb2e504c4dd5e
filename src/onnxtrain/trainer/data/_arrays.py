"""Reads arrays: checks them once before training, then slices and casts them batch by batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onnxtrain._words import argument, words
from onnxtrain.errors import InputError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.trainer.data._batch_size import check_batch_size, dynamic_remedy
from onnxtrain.trainer.data._indexed import IndexedSource
from onnxtrain.trainer.data._layout import Layout, Raw
from onnxtrain.trainer.data._source import SPLIT, Options, Pass, order_of
from onnxtrain.trainer.data._transform import Transform


@dataclass(kw_only=True)
class ArraySource(IndexedSource):
    """Source of batches from arrays with the samples along axis 0, one array per argument of the model.

    The arrays are never copied in full. Arrays in memory are checked once, before training; memory-mapped files
    (`np.memmap`) and results of a transform are checked batch by batch.

    Attributes:
        arrays: the arrays as they were passed.
        trusted: True if the values have been checked.
    """

    arrays: tuple[Array, ...]
    trusted: bool

    @classmethod
    def open(cls, layout: Layout, raw: Raw, options: Options, transform: Transform | None) -> ArraySource:
        """Checks the data against the model, and opens it as a source.

        Raises:
            InputError: the data does not match the model.
        """
        # Checking the values of a memory-mapped file would read all of it before training.
        on_disk = any(isinstance(entry, np.memmap) for entry in (*raw.inputs, *raw.targets, raw.weights))
        weighted = raw.weights is not None
        if weighted:
            layout = layout.with_weights()
        arrays = layout.flat(layout.arrays(raw))
        size, fixed = check_batch_size(layout.specs, options.batch_size)
        if transform is None:
            layout.check(arrays, values=not on_disk)
        else:
            # The model gets the transform's results, so only they must fit; images may be uint8 before.
            _require_samples(arrays)
        # A mean over weights of 0 is NaN.
        if weighted and not arrays[-1].any():
            raise InputError("All sample weights are 0: there is nothing to train on.")
        # Padding is only possible in evaluation: in a gradient, the copies would count twice.
        drop = (fixed and options.training) or options.drop_last
        source = cls(
            layout=layout,
            arrays=tuple(arrays),
            batch_size=size,
            drop=drop,
            trusted=not on_disk and transform is None,
            weighted=weighted,
            limit=options.limit,
            transform=transform,
        )
        if options.training:
            require_batch(source.samples, size, drop=drop, fixed=fixed)
        # Raises InputError if the limit is too high, before training and not at the end of the epoch.
        _ = source.batches
        return source

    def _size(self) -> int:
        return len(self.arrays[0])

    def read(self, epoch: Pass, start: int = 0) -> Iterator[list[Array]]:
        """Yields the batches of an epoch, starting with the batch with index `start`."""
        # Without shuffling, batches are slices, which numpy does not copy.
        order = order_of(self.samples, epoch) if epoch.shuffle else None
        for index in range(start, self.batches):
            part = self._places(index, epoch.worker)
            yield self._batch(self._select(part, order), epoch, index) if part.start < part.stop else []

    def _select(self, part: slice, order: Array | None) -> slice | Array:
        if order is None:
            return part if self.chosen is None else self.chosen[part]
        return order[part] if self.chosen is None else self.chosen[order[part]]

    def _batch(self, selection: slice | Array, epoch: Pass, index: int) -> list[Array]:
        arrays = [np.asarray(array[selection]) for array in self.arrays]
        # Data without weights that was opened before the models took weights.
        if len(arrays) < len(self.layout.specs):
            arrays.append(np.ones(len(arrays[0]), self.layout.weight.dtype.held))
        if self.trusted:
            return self.layout.cast(arrays)
        try:
            if self.transform is not None:
                raw = self.transform(self.layout, self._raw(arrays), epoch, index)
                return self.layout.convert(raw)
            self.layout.check(arrays)
        except InputError as error:
            raise InputError(f"{epoch.place(index)}: {error}") from error
        return self.layout.cast(arrays)

    def _raw(self, arrays: list[Array]) -> Raw:
        first, last = len(self.layout.inputs), len(self.layout.inputs) + len(self.layout.targets)
        weights = arrays[last] if self.layout.weighted else None
        return Raw(arrays[:first], arrays[first:last], weights)

    def first_target(self) -> Array:
        """Returns the values of the model's first target for all samples, [samples, ...]."""
        return self._whole(len(self.layout.inputs))

    def sample_weights(self) -> Array | None:
        """Returns the weights of all samples; None if there are none."""
        return self._whole(-1) if self.weighted else None

    def _whole(self, index: int) -> Array:
        array = self.arrays[index]
        return np.asarray(array if self.chosen is None else array[self.chosen])

    def held_out(self, samples: Array, transform: Transform | None = None) -> ArraySource:
        """Returns a source of validation data.

        Args:
            samples: indices of the samples, [n].
            transform: function that converts the batches, instead of :attr:`transform`; None to leave them unchanged.
        """
        if self.transform is not None and transform is None:
            # Without the transform, the arrays themselves must fit the model.
            try:
                self.layout.check([array[samples] for array in self.arrays])
            except InputError as error:
                raise InputError(
                    f"Validation data: {error}{words().untransformed('validation_transform')}"
                ) from error
        return dataclasses.replace(
            self.take(samples),
            drop=False,
            limit=None,
            transform=transform,
            trusted=self.trusted and transform is None,
        )


def _require_samples(arrays: list[Array]) -> None:
    lengths = [len(array) if array.ndim else 0 for array in arrays]
    if len(set(lengths)) > 1 or lengths[0] == 0:
        raise InputError(
            f"The arrays have different numbers of samples ({', '.join(map(str, lengths))}), or none."
        )


def require_batch(samples: int, size: int, *, drop: bool, fixed: bool) -> None:
    """Raises InputError if incomplete batches are dropped and there is no complete batch.

    Args:
        samples: number of samples.
        size: batch size.
        drop: True if incomplete batches are dropped.
        fixed: True if the model has a fixed batch size, for the error message.
    """
    if not drop or samples >= size:
        return
    if fixed:
        raise InputError(
            f"The model takes exactly {size} samples at a time, received {samples} to train on. {dynamic_remedy()}"
        )
    raise InputError(
        f"{argument('drop_last', True)} leaves no data: {samples} samples do not fill a batch of {size}. "
        f"Lower {argument('batch_size')}."
    )


def split_order(samples: int, fraction: float, seed: int, labels: Array | None = None) -> tuple[Array, Array]:
    """Splits samples at random. Returns the indices of the training samples and of the validation samples.

    Args:
        samples: number of samples.
        fraction: fraction of the samples to use for validation.
        seed: seed for the random choice.
        labels: class labels for a stratified split, integers [samples]: the same fraction of each class, up to
            rounding, is used for validation. None for a split that ignores classes.

    Raises:
        InputError: the fraction leaves no training samples or no validation samples; or, for a stratified split, a
            class has only one sample, or there are fewer validation samples than classes.
    """
    count = round(samples * fraction)
    if not 0 < fraction < 1 or count == 0 or count == samples:
        raise InputError(
            f"Splitting off validation data: a fraction of {fraction} of {samples} samples leaves nothing to "
            f"{'validate with' if count == 0 else 'train on'}; choose one between 0 and 1, or pass (inputs, targets)."
        )
    order = np.random.default_rng([seed, SPLIT]).permutation(samples)
    if labels is None:
        # Sorted, so that training without shuffling keeps the order of the data.
        return np.sort(order[count:]), np.sort(order[:count])
    chosen = np.zeros(samples, bool)
    for label, of_class in zip(*_shares(labels, count), strict=True):
        # In random order, so that the seed decides which samples of a class are chosen.
        chosen[order[labels[order] == label][:of_class]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def _shares(labels: Array, count: int) -> tuple[Array, Array]:
    """Divides the number of validation samples among the classes, in proportion to their sizes.

    Fractions are rounded down; the remaining samples go to the classes with the largest remainders.

    Args:
        labels: class labels of all samples, integers [samples].
        count: number of validation samples.

    Returns:
        The classes, and the number of validation samples of each.

    Raises:
        InputError: a class has only one sample, or there are fewer validation samples than classes.
    """
    classes, counts = np.unique(labels, return_counts=True)
    # As in scikit-learn's train_test_split, each class must be on both sides.
    if counts.min() < 2 or count < len(classes):
        raise InputError(
            f"Splitting off validation data by class: cannot split {count} samples off {len(classes)} "
            f"classes, of which the rarest, {classes[counts.argmin()]}, has {counts.min()} in all. Every "
            "class needs at least two samples, and the split one per class. Leave stratify out."
        )
    exact = counts * count / counts.sum()
    shares = np.floor(exact).astype(int)
    # A stable sort: for equal remainders, the first classes come first.
    first = np.argsort(-(exact - shares), kind="stable")[: count - shares.sum()]
    shares[first] += 1
    return classes, shares
