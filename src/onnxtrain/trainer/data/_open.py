"""Chooses the source that reads the user's data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from onnxtrain._words import argument
from onnxtrain.errors import InputError
from onnxtrain.trainer.data._arrays import ArraySource, require_batch, split_order
from onnxtrain.trainer.data._batch_size import static_batch
from onnxtrain.trainer.data._class_weights import read_labels
from onnxtrain.trainer.data._convert import is_sparse, names_of
from onnxtrain.trainer.data._frames import is_frame, is_series
from onnxtrain.trainer.data._held import held
from onnxtrain.trainer.data._indexed import IndexedSource
from onnxtrain.trainer.data._layout import Layout
from onnxtrain.trainer.data._samples import SampleSource, collate
from onnxtrain.trainer.data._source import Options, Pass, Source
from onnxtrain.trainer.data._stream import StreamSource
from onnxtrain.trainer.data._tokens import Padding
from onnxtrain.trainer.data._transform import Transform

TransformFunction = Callable[..., Any]
"""`(inputs, targets) -> (inputs, targets)`, or with a numpy Generator as a third argument."""


def open_source(
    layout: Layout,
    inputs: Any,
    targets: Any = None,
    weights: Any = None,
    options: Options = Options(),  # noqa: B008 it is immutable
    transform: TransformFunction | None = None,
    at: Pass = Pass(),  # noqa: B008
) -> Source:
    """Opens data as a source, and checks as much as possible without reading all of it.

    Args:
        layout: arguments of the model.
        inputs: arrays, a frame, a data set, or a stream of batches, which brings its targets.
        targets: targets of arrays and frames.
        weights: sample weights of arrays and frames.
        options: batch size and the like.
        transform: augmentation of batches.
        at: epoch that will be read first.

    Raises:
        InputError: The data does not fit the model.
    """
    augment = None if transform is None else Transform(transform)
    padding = Padding.of(layout)
    if padding is not None and (columns := padding.columns(inputs, targets, weights)) is not None:
        return SampleSource.open(layout, columns, options, augment, padding)
    if _is_whole(layout, inputs, targets):
        return ArraySource.open(layout, layout.whole(inputs, targets, weights), options, augment)
    for name, value in (("targets", targets), ("sample_weight", weights)):
        if value is not None:
            raise InputError(
                f"{name} are given beside a {type(inputs).__name__}, which brings its own: its batches (or samples) "
                "are (inputs, targets) or (inputs, targets, sample_weight)."
            )
    if _gives_samples_by_index(inputs):
        padded = padding is not None and len(inputs) > 0 and padding.fits(inputs[0])
        return SampleSource.open(layout, inputs, options, augment, padding if padded else None)
    if _is_iterable_dataset(inputs):
        # An IterableDataset gives samples, unlike every other stream, and has to be batched here.
        inputs = _Grouped(layout, inputs, options.batch_size or 32)
        options = options._replace(batch_size=None)
    if not isinstance(inputs, Iterable) and not callable(inputs):
        raise InputError(
            f"The data is a {type(inputs).__name__}. Pass arrays, a frame, a data set, a DataLoader, an iterable of "
            f"batches or a function that returns one; the model's inputs are {names_of(layout.inputs)}."
        )
    source = StreamSource(layout, inputs, options, augment)
    source.look(at)
    return source


def _is_array(data: object) -> bool:
    """Checks for an array, also for one of a kind that is refused later, with a message about arrays."""
    return (
        hasattr(data, "__array__")
        or is_frame(data)
        or is_series(data)
        or np.isscalar(data)
        or is_sparse(data)
    )


def _is_whole(layout: Layout, inputs: Any, targets: Any) -> bool:
    """Checks if the data is all samples at once, not a stream or a data set."""
    if inputs is None or isinstance(inputs, Mapping) or _is_array(inputs):
        # `datasets.load_dataset` returns a dict of splits.
        if isinstance(inputs, Mapping) and any(_gives_samples_by_index(entry) for entry in inputs.values()):
            raise InputError(
                f"The data is a dict of data sets ({', '.join(map(str, inputs))}). Choose one: data['train']."
            )
        return True
    if isinstance(inputs, list | tuple):
        # A list without targets can be the arrays of several inputs or a list of batches; entries that look like
        # batches decide.
        alone = targets is None and (layout.predicting or bool(layout.targets))
        frames = len(layout.inputs) == 1 and all(map(is_frame, inputs))
        return not (alone and inputs and (frames or all(_is_batch(entry) for entry in inputs)))
    return False


def _is_batch(entry: Any) -> bool:
    """Checks if an entry of a list is a batch of its own, and no array or row of numbers."""
    if isinstance(entry, tuple):
        return bool(entry) and not np.isscalar(entry[0])
    several = isinstance(entry, list) and bool(entry)
    return isinstance(entry, Mapping) or (several and all(hasattr(part, "__array__") for part in entry))


def _is_loader(data: object) -> bool:
    return hasattr(data, "batch_sampler") and isinstance(data, Iterable)


def _gives_samples_by_index(data: object) -> bool:
    """Checks for a map-style data set."""
    sized = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return (
        sized
        and not isinstance(data, Mapping | list | tuple | str)
        and not (
            _is_array(data) or _is_loader(data) or isinstance(data, Iterator) or _is_iterable_dataset(data)
        )
    )


def _is_iterable_dataset(data: object) -> bool:
    """Checks for an IterableDataset of PyTorch or Hugging Face, which gives samples instead of batches."""
    for module, name in (("torch.utils.data", "IterableDataset"), ("datasets", "IterableDataset")):
        # An object of these classes exists only if the program has imported the package: no import is needed.
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and isinstance(data, kind):
            return True
    return False


def split(
    source: Source,
    fraction: float,
    seed: int,
    *,
    stratify: bool = False,
    transform: TransformFunction | None = None,
) -> tuple[Source, Source]:
    """Splits a random `fraction` of the samples off; returns the rest and the fraction.

    Args:
        source: samples to split.
        fraction: fraction to split off, e.g. 0.1.
        seed: seed of the choice.
        stratify: True to split off the same fraction of each class.
        transform: conversion of the batches of the fraction that is split off.

    Raises:
        InputError: The fraction leaves one of the two empty, or no batch to train on; the data is a stream; there is no
            class label for each sample.
    """
    if not isinstance(source, IndexedSource):
        raise InputError(
            f"validation={fraction} cannot be split off a stream of batches, of which only the end tells how many "
            "there are. Pass data to validate with: validation=(inputs, targets), or another stream."
        )
    labels = read_labels(source, argument("stratify", True)) if stratify else None
    training, held_out = split_order(source.samples, fraction, seed, labels)
    rest = source.take(training)
    # The split may leave fewer samples than one batch takes.
    fixed = static_batch(source.layout.specs) is not None
    require_batch(rest.samples, rest.batch_size, drop=rest.drop, fixed=fixed)
    _ = rest.batches
    return rest, source.held_out(held_out, None if transform is None else Transform(transform))


class _Grouped:
    """Groups the samples of a data set to batches; batches that a data set gives itself are passed on."""

    def __init__(self, layout: Layout, dataset: Any, size: int) -> None:
        self.dataset = dataset
        self._layout = layout
        self._size = size

    def __iter__(self) -> Iterator[Any]:
        samples: list[Any] = []
        for sample in self.dataset:
            if not samples and self._is_batch(sample):
                yield sample
                continue
            samples.append(held(sample))
            if len(samples) == self._size:
                yield collate(samples)
                samples = []
        if samples:
            yield collate(samples)

    def _is_batch(self, sample: Any) -> bool:
        """Checks if the first input has an axis of samples already."""
        shape = self._layout.inputs[0].shape
        first = self._layout.batch(sample).inputs[0]
        return shape is not None and np.ndim(first) == len(shape)
