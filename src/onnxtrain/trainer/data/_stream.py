"""Reads streams of batches: loaders, generators, and other iterables."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from onnxtrain._words import argument
from onnxtrain.errors import InputError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.trainer.data._batch_size import dynamic_remedy, static_batch
from onnxtrain.trainer.data._held import held
from onnxtrain.trainer.data._layout import Layout, Raw
from onnxtrain.trainer.data._random import OwnNumbers
from onnxtrain.trainer.data._source import STREAM, Options, Pass, Worker
from onnxtrain.trainer.data._transform import Transform

_REMEDY = (
    "Pass something that can be read again: a DataLoader, a list of batches, or a function that returns a new "
    "iterator."
)


class _Reading:
    """Reads one pass over a stream, with a lookahead of one batch.

    Args:
        make: function that returns an iterable of batches.
        numbers: random state in which batches are prepared; None for the process's own random numbers.

    Attributes:
        delivered: number of batches taken so far.
    """

    def __init__(self, make: Callable[[], Iterable[Any]], numbers: OwnNumbers | None) -> None:
        self._numbers = numbers
        self._ahead: list[Any] = []
        self.delivered = 0
        self._size: int | None = None
        if numbers is None:
            self._iterator = iter(make())
        else:
            with numbers.drawn():
                self._iterator = iter(make())

    def _next(self) -> Any:
        if self._numbers is None:
            return next(self._iterator)
        with self._numbers.drawn():
            return next(self._iterator)

    def peek(self) -> Any:
        """Returns the next batch without consuming it; raises StopIteration at the end."""
        if not self._ahead:
            # Copied: another stream may write to the same buffer before this batch is taken, e.g. validation data.
            self._ahead.append(held(self._next()))
        return self._ahead[0]

    def take(self) -> Any:
        """Returns and consumes the next batch; raises StopIteration at the end."""
        batch = self._ahead.pop() if self._ahead else self._next()
        self.delivered += 1
        return batch

    def unless_incomplete(self, raw: Raw, size: int | None) -> Raw | None:
        """Returns the batch `raw`, or None if it is an incomplete last batch.

        Args:
            raw: the batch that :meth:`take` returned last.
            size: number of samples in a complete batch; None for the size of the first batch.
        """
        count = len(raw.inputs[0])
        # A smaller batch is incomplete only at the end of the stream; some loaders vary the batch size.
        self._size = self._size or size or count
        if count >= self._size:
            return raw
        # Copied, because the next batch may overwrite it.
        kept = Raw(*map(held, raw))
        try:
            self.peek()
        except StopIteration:
            return None
        return kept


class StreamSource:
    """Source that reads a stream of batches, which can only be read from the beginning.

    An epoch is one pass over the stream. With a `limit`, an epoch has that number of batches and starts where the
    previous epoch ended; at the end of the stream, the next pass begins. The global generators (random, numpy.random,
    torch) are seeded from the trainer's seed and the pass number while batches are prepared, so that a resumed fit can
    re-read an epoch up to the batch where training stopped.

    Args:
        layout: names, dtypes and shapes of the arrays of a batch.
        stream: an iterable, a function that returns one, or an iterator, which can be read only once.
        options: read options; `batch_size` is not allowed in training, because the data is already batched.
        transform: function that augments the batches; None for no augmentation.
    """

    batch_size = None
    samples = None
    volatile = True

    def __init__(self, layout: Layout, stream: Any, options: Options, transform: Transform | None) -> None:
        if options.training and options.batch_size is not None:
            raise InputError(
                f"{argument('batch_size')} is passed, but the data already comes in batches. Leave it out, "
                "and set it where the batches are made (DataLoader(..., batch_size=...))."
            )
        self.layout = layout
        self._stream = stream
        # `iter` of an iterator is the iterator itself: a second pass would start where the first ended.
        self._once = isinstance(stream, Iterator)
        self._options = options
        self._transform = transform
        self._size = static_batch(layout.specs)
        self._drop = options.drop_last or (options.training and self._size is not None)
        self._reading: _Reading | None = None
        # Number of the current pass, counted from the beginning of the fit.
        self._number = 0
        # Batches read since the beginning of the fit; without a limit, in this pass.
        self._taken: int | None = None
        self._generators = _own_generators(stream)
        self._mark: str | None = None
        self.weighted = False

    @property
    def batches(self) -> int | None:
        """Number of batches per epoch; None if unknown."""
        if self._options.limit is not None:
            return self._options.limit
        try:
            # `len` of a DataLoader over an IterableDataset raises TypeError; other loaders raise the other two.
            return len(self._stream)
        except (TypeError, AttributeError, NotImplementedError):
            return None

    def look(self, epoch: Pass) -> None:
        """Checks the first batch, and records whether it has sample weights.

        Raises:
            InputError: there is no batch, or it does not match the model.
        """
        self._mark = self._states()
        # The generators were recorded before the first batch is drawn, which a resumed fit must draw again.
        self._reading = self._open(epoch, 0)
        try:
            batch = self._reading.peek()
        except StopIteration:
            raise InputError(self._nothing(0)) from None
        try:
            raw = self.layout.batch(batch)
            self.weighted = raw.weights is not None
            if self.weighted:
                self.layout = self.layout.with_weights()
            if self._transform is None:
                self._require_size(self.layout.convert(raw))
        except InputError as error:
            raise InputError(f"The first batch: {error}") from error

    def begin(self, mark: str | None, *, resumed: bool, epochs: int) -> None:
        """Prepares the stream for a fit. In a resumed fit, restores the stream's own random generators.

        Args:
            mark: the generator states that :meth:`mark` returned in the interrupted fit; None if there are none.
            resumed: True if the fit continues an interrupted fit.
            epochs: number of epochs of the fit.

        Raises:
            InputError: the stream is an iterator, but the fit is resumed or reads several passes; or the states do not
                match the stream's generators.
        """
        if self._once and resumed:
            raise InputError(
                "The fit was interrupted, and an iterator cannot be rewound to the batch where it "
                f"stopped. {_REMEDY} Or start a new fit from here: abandon_fit()."
            )
        if self._once and epochs > 1 and self._options.limit is None:
            raise InputError(
                f"epochs={epochs}, but the data is an iterator, which can be read only once. {_REMEDY} Or "
                "pass steps_per_epoch, the number of its batches per epoch."
            )
        if resumed and mark is not None and self._generators:
            self._reading, self._mark = None, mark
            self._restore(mark)

    def last(self) -> None:
        """Returns None: an incomplete last batch cannot be read without reading the whole stream."""
        return

    def mark(self) -> str | None:
        """Returns the states of the stream's own random generators, from which a resumed fit re-reads the data.

        They are the states at the start of the epoch or, with a `limit`, of the fit. Returns None if the stream has no
        generators of its own.
        """
        return self._mark

    def _restore(self, mark: str) -> None:
        """Restores the stream's own random generators; raises InputError if the states do not match them."""
        try:
            for generator, state in zip(self._generators, mark.split(), strict=True):
                # Written through numpy, so that torch need not be imported here.
                tensor = generator.get_state()
                tensor.numpy()[:] = np.frombuffer(base64.b64decode(state, validate=True), np.uint8)
                generator.set_state(tensor)
        except (ValueError, RuntimeError) as error:
            raise InputError(
                f"Resuming an interrupted fit: the saved states of {len(mark.split())} generators do not fit the "
                f"{len(self._generators)} of this data ({error}). Pass the same data, or call abandon_fit() first."
            ) from error

    def _states(self) -> str | None:
        if not self._generators:
            return None
        states = (generator.get_state().numpy().tobytes() for generator in self._generators)
        return " ".join(base64.b64encode(state).decode() for state in states)

    def read(self, epoch: Pass, start: int = 0) -> Iterator[list[Array]]:
        """Yields the batches of an epoch; batches before `start` are read and discarded."""
        limit = self._options.limit
        wanted = start + (0 if limit is None else (epoch.epoch - epoch.fit_start) * limit)
        # Continues reading if the current position is before the wanted batch, else restarts the stream.
        if limit is None or self._taken is None or self._taken > wanted:
            if self._taken is not None:
                self._reading = None
            self._taken = self._number = 0
        while self._taken < wanted:
            if self._next(epoch, wanted - start) is None:
                raise InputError(
                    f"The fit was interrupted after {start} batches of epoch {epoch.epoch + 1}, and this data has "
                    f"{self._taken}. Pass the same data to resume it, or call abandon_fit() first."
                )
        index = start
        while limit is None or index < limit:
            raw = self._next(epoch, index)
            if raw is None:
                break
            yield self._convert(raw, epoch, index)
            index += 1
        if index == 0:
            raise InputError(self._nothing(epoch.epoch))
        if limit is None:
            self._mark = self._states()

    def _next(self, epoch: Pass, index: int) -> Raw | None:
        """Returns the next batch that is not dropped. Without a `limit`, returns None at the end of the stream.

        Args:
            epoch: the epoch that is read.
            index: index of the batch in the epoch, for error messages.
        """
        while True:
            if self._reading is None:
                self._reading = self._open(epoch, self._number)
            try:
                raw = self.layout.batch(self._reading.take())
            except StopIteration:
                if self._options.limit is None:
                    return None
                self._end_pass(epoch, index)
                continue
            except InputError as error:
                raise InputError(f"{epoch.place(index)}: {error}") from error
            if self._drop:
                kept = self._reading.unless_incomplete(raw, self._size)
                # The incomplete batch is dropped; a new pass starts with the next one.
                if kept is None:
                    continue
                raw = kept
            assert self._taken is not None
            self._taken += 1
            return raw

    def _end_pass(self, epoch: Pass, index: int) -> None:
        """Ends a pass over the stream before the epoch ends, so that the next read starts another pass.

        Args:
            epoch: the epoch that is read.
            index: number of batches read so far in the epoch, for error messages.

        Raises:
            InputError: the stream cannot be read again, or is empty.
        """
        assert self._reading is not None
        if self._once:
            raise InputError(
                f"The iterator ended after {index} of the {self._options.limit} batches of epoch "
                f"{epoch.epoch + 1} that steps_per_epoch asks for, and it can be read only once. {_REMEDY}"
            )
        # An empty stream would be read forever.
        if not self._reading.delivered:
            raise InputError(self._nothing(epoch.epoch))
        self._number += 1
        self._reading = None

    def _open(self, epoch: Pass, number: int) -> _Reading:
        """Starts a pass over the stream; `number` is the number of earlier passes in the fit."""
        if self._once:
            return _Reading(lambda: self._stream, None)
        count = epoch.fit_start + number if self._options.limit else epoch.epoch
        # PyTorch's DistributedSampler and Hugging Face datasets shuffle by the epoch passed to set_epoch.
        for part in (self._stream, *(getattr(self._stream, name, None) for name in ("sampler", "dataset"))):
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(count)
        make = self._stream if callable(self._stream) and not isinstance(self._stream, Iterable) else None
        return _Reading(make or (lambda: self._stream), OwnNumbers(epoch.seed, STREAM, count))

    def _require_size(self, arrays: list[Array]) -> None:
        size, count = self._size, len(arrays[0])
        if size is not None and (count > size or (count < size and self._options.training)):
            raise InputError(
                f"it has {count} samples, but the model takes exactly {size}. {dynamic_remedy()}"
            )

    def _convert(self, raw: Raw, epoch: Pass, index: int) -> list[Array]:
        try:
            if epoch.worker.size > 1:
                raw = self._shared(raw, epoch.worker)
                if not len(raw.inputs[0]):
                    return []
            if self._transform is not None:
                raw = self._transform(self.layout, self.layout.arrays(raw), epoch, index, lent=True)
            arrays = self.layout.convert(raw)
            self._require_size(arrays)
            return arrays
        except InputError as error:
            raise InputError(f"{epoch.place(index)}: {error}") from error

    def _shared(self, raw: Raw, worker: Worker) -> Raw:
        """Returns a worker's share of a batch.

        Raises:
            InputError: the entries differ in length.
        """
        raw = self.layout.arrays(raw)
        entries = [*raw.inputs, *raw.targets, *([] if raw.weights is None else [raw.weights])]
        # Entries of different lengths could have shares of equal length, which do not belong together.
        lengths = sorted({len(entry) if entry.ndim else 0 for entry in entries})
        if len(lengths) > 1:
            raise InputError(f"its arrays have different numbers of samples: {', '.join(map(str, lengths))}.")
        share = worker.share(lengths[0])
        weights = None if raw.weights is None else raw.weights[share]
        return Raw([entry[share] for entry in raw.inputs], [entry[share] for entry in raw.targets], weights)

    def _nothing(self, epoch: int) -> str:
        subject = (
            "The iterator is exhausted: it" if self._once else f"The data ({type(self._stream).__name__})"
        )
        return f"{subject} has no batch for epoch {epoch + 1}. {_REMEDY if self._once else ''}".rstrip()


def _own_generators(stream: Any) -> list[Any]:
    """Returns the PyTorch generators that a DataLoader and its samplers use instead of the process's generator."""
    batches = getattr(stream, "batch_sampler", None)
    owners = (stream, getattr(stream, "sampler", None), batches, getattr(batches, "sampler", None))
    generators: list[Any] = []
    for owner in owners:
        generator = getattr(owner, "generator", None)
        if hasattr(generator, "get_state") and all(generator is not other for other in generators):
            generators.append(generator)
    return generators
