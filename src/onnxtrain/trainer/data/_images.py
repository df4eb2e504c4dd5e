"""Reads images: decodes the files of a few batches ahead in threads, beside training."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from onnxtrain._printable import get_logger, printable
from onnxtrain.errors import InputError
from onnxtrain.images import ImageFolder
from onnxtrain.images._decode import UnreadableImageError
from onnxtrain.images._pipeline import Pipeline
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.trainer.data._arrays import require_batch
from onnxtrain.trainer.data._batch_size import check_batch_size
from onnxtrain.trainer.data._convert import names_of
from onnxtrain.trainer.data._indexed import IndexedSource
from onnxtrain.trainer.data._layout import Layout, Raw
from onnxtrain.trainer.data._source import IMAGES, Options, Pass, Worker, order_of
from onnxtrain.trainer.data._transform import Transform

_log = get_logger()

# Names of unreadable files in a message.
_SHOWN = 5
# Batches that are decoded ahead, at least. With fewer, a slow file would stop training.
_AHEAD = 2


@dataclass(frozen=True, kw_only=True)
class BoundImages:
    """A folder of images, prepared for one model.

    Attributes:
        folder: the files.
        pipeline: how they become inputs.
        labels: class index of each file, int64 [files]; None for prediction.
        classes: names of the model's classes, in the order of their indices; empty if they are unknown.
        skips: True to skip files that cannot be read when predicting; False to raise an error, because predictions
            would no longer match the files.
    """

    folder: ImageFolder
    pipeline: Pipeline
    labels: Array | None
    classes: tuple[str, ...] = ()
    skips: bool = False


@dataclass
class _Batch:
    """A batch whose files are being decoded.

    Attributes:
        index: index of the batch in the epoch.
        samples: indices of the files, int64 [samples].
        inputs: memory that the threads write, [samples, ...].
        tasks: one task per file; its result is None, or why the file cannot be read.
    """

    index: int
    samples: Array
    inputs: Array
    tasks: list[Future[str | None]]


@dataclass(kw_only=True)
class ImageSource(IndexedSource):
    """Source of batches from image files.

    Files are decoded by threads into the memory of a few batches ahead of training, so the memory does not depend on
    the number of files. Random numbers of augmentation are derived from the seed, the epoch and the index of the file,
    so they depend neither on the number of threads nor on the batch.

    Unreadable files are left out of their batch, and reported once per pass.

    Attributes:
        images: the files.
        augments: True to augment the images of training passes.
        training: True for training data, which must have readable files of each class.
    """

    images: BoundImages
    augments: bool
    training: bool

    @classmethod
    def open(
        cls, layout: Layout, images: BoundImages, options: Options, transform: Transform | None
    ) -> ImageSource:
        """Checks images against the model, and opens them as a source. No file is decoded.

        Raises:
            InputError: the model has several inputs, or a target that classes do not fit.
        """
        if len(layout.inputs) != 1:
            raise InputError(
                f"Reading images: the model has the inputs {names_of(layout.inputs)}, but a folder of images has one. "
                "Pass a dataset or batches with all inputs."
            )
        size, fixed = check_batch_size(layout.specs, options.batch_size)
        drop = (fixed and options.training) or options.drop_last
        source = cls(
            layout=layout,
            batch_size=size,
            drop=drop,
            limit=options.limit,
            transform=transform,
            images=images,
            augments=options.training,
            training=options.training,
        )
        if layout.targets and transform is None:
            source._targets(np.zeros(1, np.int64))
        if options.training:
            require_batch(source.samples, size, drop=drop, fixed=fixed)
        _ = source.batches
        return source

    def _size(self) -> int:
        return len(self.images.folder)

    def first_target(self) -> Array:
        """Returns the class indices of all samples, int64 [samples]."""
        return self._labels if self.chosen is None else self._labels[self.chosen]

    def sample_weights(self) -> None:
        """Returns None: images have no weights."""
        return

    def held_out(self, samples: Array, transform: Transform | None = None) -> ImageSource:
        """Returns a source of validation data, without augmentation.

        Args:
            samples: indices of the samples, [n].
            transform: function that converts the batches, instead of :attr:`transform`; None to leave them unchanged.
        """
        return dataclasses.replace(
            self.take(samples), drop=False, limit=None, transform=transform, augments=False, training=False
        )

    @property
    def _labels(self) -> Array:
        assert self.images.labels is not None
        return self.images.labels

    def last(self) -> list[Array] | None:
        """Returns the incomplete last batch; None if there is none, or none of its files can be read."""
        whole, rest = divmod(self.samples, self.batch_size)
        return next(self._read(Pass(), range(whole, whole + 1)), None) if rest else None

    @property
    def kept(self) -> Array:
        """Indices of the files that have not been found unreadable, in the order of an unshuffled pass, int64 [n]."""
        return self._indices[~np.isin(self._indices, list(self.images.folder.unreadable))]

    @property
    def _indices(self) -> Array:
        return np.arange(self._size()) if self.chosen is None else self.chosen

    def read(self, epoch: Pass, start: int = 0) -> Iterator[list[Array]]:
        """Yields the batches of an epoch, starting with the batch with index `start`."""
        yield from self._read(epoch, range(start, self.batches))
        # After the last batch: all files have been tried.
        if not start:
            self._report()

    def read_own(self, worker: Worker) -> Iterator[list[Array]]:
        """Yields the batches that a worker evaluates, see :func:`own_batches`."""
        yield from self._read(Pass(), range(worker.rank, self.batches, worker.size))
        self._report()

    def _read(self, epoch: Pass, batches: range) -> Iterator[list[Array]]:
        """Yields the batches of an epoch with the indices `batches`."""
        order = self._indices[order_of(self.samples, epoch)]
        workers = self.images.folder.workers
        ahead = max(_AHEAD, -(-2 * workers // self.batch_size))
        pending: deque[_Batch] = deque()
        threads = ThreadPoolExecutor(workers, thread_name_prefix="onnxtrain-images")
        try:
            for index in batches:
                pending.append(self._begin(threads, order[self._places(index, epoch.worker)], epoch, index))
                if len(pending) > ahead:
                    yield from self._finish(pending.popleft(), epoch, order)
            while pending:
                yield from self._finish(pending.popleft(), epoch, order)
        finally:
            # Files of batches that nobody reads any more need not be decoded.
            threads.shutdown(cancel_futures=True)

    def _begin(self, threads: ThreadPoolExecutor, samples: Array, epoch: Pass, index: int) -> _Batch:
        """Starts to decode a batch."""
        pipeline, dtype = self.images.pipeline, self.images.pipeline.table.dtype
        batch = _Batch(index, samples, np.empty((len(samples), *pipeline.shape), dtype), [])
        for place, sample in enumerate(samples.tolist()):
            batch.tasks.append(threads.submit(self._decode, sample, batch.inputs[place], epoch))
        return batch

    def _decode(self, sample: int, out: Array, epoch: Pass) -> str | None:
        """Decodes a file into `out`; returns why it cannot be read, or None."""
        folder = self.images.folder
        # A file that has become readable in the meantime would make epochs differ.
        if sample in folder.unreadable:
            return folder.unreadable[sample]
        generator = None
        if self.augments and epoch.training:
            generator = np.random.default_rng([epoch.seed, IMAGES, epoch.epoch, sample])
        try:
            self.images.pipeline.load(folder.path(sample), out, generator)
        except UnreadableImageError as error:
            return str(error)
        return None

    def _finish(self, batch: _Batch, epoch: Pass, order: Array) -> Iterator[list[Array]]:
        """Yields a decoded batch; nothing for a batch of evaluation data without a readable file."""
        problems = [task.result() for task in batch.tasks]
        # Workers whose share of a batch is empty get an empty list.
        if not problems:
            yield []
            return
        inputs, samples = batch.inputs, batch.samples
        if any(problems):
            self._note(samples, problems)
            kept = np.flatnonzero([problem is None for problem in problems])
            inputs, samples = inputs[kept], samples[kept]
            if epoch.training and epoch.worker.size == 1:
                inputs, samples = self._filled(inputs, samples, batch, epoch, order)
            if not len(samples):
                if epoch.worker.size > 1:
                    yield []
                return
        yield self._convert(inputs, samples, epoch, batch.index)

    def _filled(
        self, inputs: Array, samples: Array, batch: _Batch, epoch: Pass, order: Array
    ) -> tuple[Array, Array]:
        """Fills a training batch with unreadable files, if it would be empty or the model has a fixed batch size.

        The batch gets the next readable file of the epoch if it is empty. It gets copies of its images up to a fixed
        size.
        """
        if not len(samples):
            after = (batch.index * self.batch_size + len(batch.samples)) % len(order)
            for sample in np.roll(order, -after).tolist():
                out = np.empty(self.images.pipeline.shape, inputs.dtype)
                problem = self._decode(sample, out, epoch)
                if problem is None:
                    inputs, samples = out[None], np.array([sample])
                    break
                self._note(np.array([sample]), [problem])
        if len(samples) and self.layout.inputs[0].shape and isinstance(self.layout.inputs[0].shape[0], int):
            repeated = np.arange(len(batch.samples)) % len(samples)
            return inputs[repeated], samples[repeated]
        return inputs, samples

    def _convert(self, inputs: Array, samples: Array, epoch: Pass, index: int) -> list[Array]:
        targets = []
        if self.layout.targets:
            labels = self._labels[samples]
            # A transform such as MixUp may take labels and return probabilities.
            targets = [labels if self.transform is not None and self._by_transform else self._targets(labels)]
        raw = Raw([inputs], targets)
        try:
            if self.transform is not None:
                raw = self.transform(self.layout, raw, epoch, index)
                return self.layout.convert(raw)
            arrays = self.layout.flat(raw)
            # The values are in range: they come from a table of 256 finite numbers, and from class indices.
            return self.layout.cast(arrays)
        except InputError as error:
            raise InputError(f"{epoch.place(index)}: {error}") from error

    @property
    def _by_transform(self) -> bool:
        """True if the transform encodes the labels itself, as `MixUp(classes=3)` does."""
        function = getattr(self.transform, "function", None)
        return getattr(function, "classes", None) is not None

    def _targets(self, labels: Array) -> Array:
        """Encodes class indices [samples] as the model's target: indices, probabilities, or one value per sample.

        Raises:
            InputError: the target is neither.
        """
        if len(self.layout.targets) != 1:
            raise InputError(
                f"Reading images: the model has the targets {names_of(self.layout.targets)}, but a folder of images "
                "has one class per image."
            )
        spec = self.layout.targets[0]
        shape = spec.shape or (None,)
        if spec.class_labels is not None and len(shape) == 1:
            return labels
        classes = len(self.images.classes)
        if spec.dtype.storage.kind == "f" or spec.dtype.name == "bfloat16":
            dtype = spec.dtype.held
            if len(shape) == 1 or (len(shape) == 2 and shape[1] == 1):
                if classes > 2:
                    raise InputError(_unsuitable(spec, f"{classes} classes"))
                return labels.astype(dtype).reshape(-1, *([1] if len(shape) == 2 else []))
            if len(shape) == 2:
                count = shape[1] if isinstance(shape[1], int) else classes
                one_hot: Array = np.eye(count, dtype=dtype)[labels]
                return one_hot
        raise InputError(_unsuitable(spec, "one class per image"))

    def _note(self, samples: Array, problems: Sequence[str | None]) -> None:
        """Records files that cannot be read; raises InputError if a class of the training data has no other file."""
        unreadable = self.images.folder.unreadable
        new = {
            sample: problem
            for sample, problem in zip(samples.tolist(), problems, strict=True)
            if problem is not None and sample not in unreadable
        }
        unreadable.update(new)
        if not new or not self.training or not self.layout.targets:
            return
        left = set(self._labels[self.kept].tolist())
        if empty := sorted(set(self.first_target().tolist()) - left):
            names = self.images.classes or [str(index) for index in range(max(empty) + 1)]
            raise InputError(
                f"None of the training images of the class {', '.join(names[index] for index in empty)} can be read: "
                f"{self._listed()}. Replace the files, or remove the class."
            )

    def _report(self) -> None:
        """Warns of unreadable files after a whole pass.

        Raises:
            InputError: no file can be read; or the pass was a prediction, which no longer matches the files.
        """
        folder = self.images.folder
        unreadable = self._unreadable
        if not unreadable:
            return
        message = f"{len(unreadable):,} of {self.samples:,} images cannot be read"
        if len(unreadable) == self.samples:
            raise InputError(f"None of the {self.samples:,} images can be read: {self._listed()}.")
        if self.layout.predicting and not self.images.skips:
            raise InputError(
                f"{message}: {self._listed()}. Predictions would not match the files. Pass ImageFolder(...).readable(),"
                " which leaves them out; the other files are in its attribute files."
            )
        if not folder.reported.issuperset(unreadable):
            folder.reported.update(unreadable)
            _log.warning("%s and are skipped: %s.", message, self._listed())

    @property
    def _unreadable(self) -> list[int]:
        """Indices of the files of this source that have been found unreadable."""
        found = list(self.images.folder.unreadable)
        return [int(index) for index in self._indices[np.isin(self._indices, found)]]

    def _listed(self) -> str:
        """Returns the first unreadable files and the reasons, for messages."""
        indices = self._unreadable
        shown = "; ".join(printable(self.images.folder.unreadable[index]) for index in indices[:_SHOWN])
        return f"{shown}; and {len(indices) - _SHOWN:,} more" if len(indices) > _SHOWN else shown


def _unsuitable(spec: InputSpec, what: str) -> str:
    shape = ", ".join(str(size or "?") for size in spec.shape or ())
    return (
        f"Reading images: there is {what}, which does not fit the target '{spec.name}' ({spec.dtype.name} [{shape}]). "
        "Choose a loss for classes, such as cross_entropy."
    )
