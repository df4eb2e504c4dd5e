"""Defines `WrappedSource`, the base class of sources that change what another source yields."""

from __future__ import annotations

from collections.abc import Iterator

from onnxtrain.runtime.dtypes import Array
from onnxtrain.trainer.data._layout import Layout
from onnxtrain.trainer.data._source import Pass, Source


class WrappedSource:
    """A source that does everything as another one does. Subclasses override what differs.

    Args:
        source: the source to wrap.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def wrapped(self) -> Source:
        """The wrapped source."""
        return self._source

    @property
    def layout(self) -> Layout:
        """Names, dtypes and shapes of a batch's arrays; setting it sets the layout of the wrapped source."""
        return self._source.layout

    @layout.setter
    def layout(self, layout: Layout) -> None:
        self._source.layout = layout

    @property
    def weighted(self) -> bool:
        """True if the data includes a weight for each sample."""
        return self._source.weighted

    @property
    def samples(self) -> int | None:
        """Number of samples; None for a stream."""
        return self._source.samples

    @property
    def batch_size(self) -> int | None:
        """Samples per batch; None if the data consists of batches."""
        return self._source.batch_size

    @property
    def batches(self) -> int | None:
        """Number of batches per epoch; None if unknown before the stream ends."""
        return self._source.batches

    @property
    def volatile(self) -> bool:
        """True if a batch may be overwritten when the next one is read; see :class:`Source`."""
        return self._source.volatile

    def begin(self, mark: str | None, *, resumed: bool, epochs: int) -> None:
        """Prepares the wrapped source for a fit; the arguments are those of :meth:`Source.begin`."""
        self._source.begin(mark, resumed=resumed, epochs=epochs)

    def mark(self) -> str | None:
        """Returns the state that the wrapped source needs to repeat the current epoch in a resumed fit."""
        return self._source.mark()

    def last(self) -> list[Array] | None:
        """Returns the incomplete last batch; None if there is none."""
        return self._source.last()

    def read(self, epoch: Pass, start: int = 0) -> Iterator[list[Array]]:
        """Yields the batches of a pass."""
        return self._source.read(epoch, start)
