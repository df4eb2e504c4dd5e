"""Limits a source to the first batches of each pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from onnxtrain._words import argument
from onnxtrain.errors import InputError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.trainer.data._source import Pass, Source
from onnxtrain.trainer.data._wrapped import WrappedSource


def check_limit(limit: object) -> int | float | None:
    """Checks a number of batches (int) or fraction of the batches (float), and returns it.

    Raises:
        InputError: it is neither an integer from 1 nor a fraction above 0 and at most 1.
    """
    if limit is None:
        return None
    if isinstance(limit, bool) or not (
        (isinstance(limit, int) and limit >= 1) or (isinstance(limit, float) and 0 < limit <= 1)
    ):
        raise InputError(
            f"{argument('limit_batches')} must be a number of batches, e.g. 10, or a fraction above 0 and at most 1, "
            f"e.g. 0.05; received {limit!r}."
        )
    return limit


def limited(source: Source, limit: int | float) -> Source:
    """Returns a source of the first batches of another one, or the source itself if it has no more.

    Args:
        source: the source.
        limit: number of batches, or fraction of all batches, rounded up.

    Raises:
        InputError: the limit is a fraction, and the number of batches is unknown.
    """
    batches = source.batches
    if isinstance(limit, float):
        if batches is None:
            raise InputError(
                f"{argument('limit_batches', limit)} is a fraction of the batches, but the length of the data is "
                "unknown; pass a number of batches."
            )
        limit = math.ceil(limit * batches)
    return source if batches is not None and batches <= limit else LimitedSource(source, limit)


class LimitedSource(WrappedSource):
    """Wraps a source, and ends each pass after a number of batches.

    Args:
        source: the source.
        limit: number of batches, at most those of the source.
    """

    def __init__(self, source: Source, limit: int) -> None:
        super().__init__(source)
        self._limit = limit

    @property
    def batches(self) -> int | None:
        """Number of batches per pass; None for a stream, which may end earlier."""
        return None if self._source.batches is None else self._limit

    def last(self) -> list[Array] | None:
        """Returns None: the last batch of the wrapped source is not read."""
        return None

    def read(self, epoch: Pass, start: int = 0) -> Iterator[list[Array]]:
        """Yields the batches of a pass up to the limit."""
        if start >= self._limit:
            return
        yield from islice(self._source.read(epoch, start), self._limit - start)
