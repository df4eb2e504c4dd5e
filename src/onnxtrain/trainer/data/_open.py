"""Chooses the source that reads a user's data."""

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
from onnxtrain.trainer.data._images import BoundImages, ImageSource
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
    """Opens data as a source of batches; checks as much of it as possible without reading everything.

    Args:
        layout: names, dtypes and shapes of a batch's arrays.
        inputs: arrays, a frame, a dataset, images, or a stream of batches that include their targets.
        targets: targets, if `inputs` is arrays or a frame.
        weights: sample weights, if `inputs` is arrays or a frame.
        options: batch size and other options for reading.
        transform: function that augments the batches; None for no augmentation.
        at: the epoch that will be read first.

    Raises:
        InputError: the data does not match the model.
    """
    augment = None if transform is None else Transform(transform)
    if isinstance(inputs, BoundImages):
        return ImageSource.open(layout, inputs, options, augment)
    padding = Padding.of(layout)
    if padding is not None and (columns := padding.columns(inputs, targets, weights)) is not None:
        return SampleSource.open(layout, columns, options, augment, padding)
    if _is_whole(layout, inputs, targets):
        return ArraySource.open(layout, layout.whole(inputs, targets, weights), options, augment)
    for name, value in (("targets", targets), ("sample_weight", weights)):
        if value is not None:
            raise InputError(
                f"{name} are passed in addition to a {type(inputs).__name__}, which must include them: its "
                "batches (or samples) are (inputs, targets) or (inputs, targets, sample_weight)."
            )
    if _gives_samples_by_index(inputs):
        padded = padding is not None and len(inputs) > 0 and padding.fits(inputs[0])
        return SampleSource.open(layout, inputs, options, augment, padding if padded else None)
    if _is_iterable_dataset(inputs):
        # Unlike other streams, an IterableDataset yields samples, which are batched here.
        inputs = _Grouped(layout, inputs, options.batch_size or 32)
        options = options._replace(batch_size=None)
    if not isinstance(inputs, Iterable) and not callable(inputs):
        raise InputError(
            f"The data is a {type(inputs).__name__}. Pass arrays, a frame, a dataset, a DataLoader, an iterable of "
            f"batches or a function that returns one; the model's inputs are {names_of(layout.inputs)}."
        )
    source = StreamSource(layout, inputs, options, augment)
    source.look(at)
    return source


def _is_array(data: object) -> bool:
    """True for an array or scalar, including types that are rejected later with a more specific error."""
    return (
        hasattr(data, "__array__")
        or is_frame(data)
        or is_series(data)
        or np.isscalar(data)
        or is_sparse(data)
    )


def _is_whole(layout: Layout, inputs: Any, targets: Any) -> bool:
    """True if the data consists of arrays or frames with all samples, rather than a stream or a dataset."""
    if inputs is None or isinstance(inputs, Mapping) or _is_array(inputs):
        # `datasets.load_dataset` returns a dict of splits.
        if isinstance(inputs, Mapping) and any(_gives_samples_by_index(entry) for entry in inputs.values()):
            raise InputError(
                f"The data is a dict of datasets ({', '.join(map(str, inputs))}). Choose one: data['train']."
            )
        return True
    if isinstance(inputs, list | tuple):
        # A list without targets is either the arrays of several inputs, or a list of batches; its entries decide.
        alone = targets is None and (layout.predicting or bool(layout.targets))
        frames = len(layout.inputs) == 1 and all(map(is_frame, inputs))
        return not (alone and inputs and (frames or all(_is_batch(entry) for entry in inputs)))
    return False


def _is_batch(entry: Any) -> bool:
    """True if a list's entry is a batch rather than an array or a row of numbers."""
    if isinstance(entry, tuple):
        return bool(entry) and not np.isscalar(entry[0])
    several = isinstance(entry, list) and bool(entry)
    return isinstance(entry, Mapping) or (several and all(hasattr(part, "__array__") for part in entry))


def _is_loader(data: object) -> bool:
    return hasattr(data, "batch_sampler") and isinstance(data, Iterable)


def _gives_samples_by_index(data: object) -> bool:
    """True for a map-style dataset, which returns samples by index."""
    sized = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return (
        sized
        and not isinstance(data, Mapping | list | tuple | str)
        and not (
            _is_array(data) or _is_loader(data) or isinstance(data, Iterator) or _is_iterable_dataset(data)
        )
    )


def _is_iterable_dataset(data: object) -> bool:
    """True for a PyTorch or Hugging Face IterableDataset, which yields samples, not batches."""
    for module, name in (("torch.utils.data", "IterableDataset"), ("datasets", "IterableDataset")):
        # If the program has not imported the package, the object cannot be of its class.
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
    """Splits off a random fraction of the samples. Returns the training source and the validation source.

    Args:
        source: samples to split.
        fraction: fraction to split off, e.g. 0.1.
        seed: seed for the random choice.
        stratify: True to split off the same fraction of each class.
        transform: function that converts validation batches; None to leave them unchanged.

    Raises:
        InputError: the training or the validation part would be empty; the training part would be smaller than a batch,
            and incomplete batches are dropped; the data is a stream; or, with `stratify`, samples do not have one class
            label each.
    """
    if not isinstance(source, IndexedSource):
        raise InputError(
            f"validation={fraction} cannot be split off a stream of batches, because its length is "
            "unknown. Pass validation data: validation=(inputs, targets), or another stream."
        )
    labels = read_labels(source, argument("stratify", True)) if stratify else None
    training, held_out = split_order(source.samples, fraction, seed, labels)
    rest = source.take(training)
    # The split may leave fewer samples than one batch.
    fixed = static_batch(source.layout.specs) is not None
    require_batch(rest.samples, rest.batch_size, drop=rest.drop, fixed=fixed)
    _ = rest.batches
    return rest, source.held_out(held_out, None if transform is None else Transform(transform))


class _Grouped:
    """Iterates over an iterable dataset in batches: groups single samples, and passes batches through unchanged.

    The last batch may be incomplete.

    Args:
        layout: inputs and targets of the model, which distinguish samples from batches.
        dataset: iterable of samples or batches.
        size: number of samples per batch.
    """

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
        """True if the first input already has a sample axis."""
        shape = self._layout.inputs[0].shape
        first = self._layout.batch(sample).inputs[0]
        return shape is not None and np.ndim(first) == len(shape)
