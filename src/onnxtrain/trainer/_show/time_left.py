"""Estimates how long a fit still takes."""

from __future__ import annotations

import time
from collections.abc import Callable


class TimeLeft:
    """Estimates the time until the end of a fit, from the epochs and batches that are done.

    All epochs are expected to take as long as the last one, with its validation. In the first epoch, batches are
    expected to take as long as those that are done.

    Args:
        clock: function that returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = 0.0
        self._later = 0
        self._batches: int | None = None
        self._done = self._done_before = 0
        # Duration of the last whole epoch; None before its end.
        self._epoch: float | None = None
        self._whole = False

    def begin_epoch(self, epoch: int, epochs: int, batches: int | None, done: int) -> None:
        """Starts an epoch; for the arguments, see :meth:`Report.begin_epoch`."""
        now = self._clock()
        if self._whole:
            self._epoch = now - self._began
        self._began, self._later, self._batches = now, epochs - epoch, batches
        self._done = self._done_before = done
        self._whole = not done

    def step(self, batches: int) -> None:
        """Counts batches that are done."""
        self._done += batches

    def text(self) -> str:
        """Returns the time left, e.g. "1:05 left" or "2:00:00 left"; "" if nothing tells it yet."""
        elapsed, new = self._clock() - self._began, self._done - self._done_before
        whole = self._epoch
        if whole is None and self._batches and new:
            whole = elapsed / new * self._batches
        if whole is None:
            return ""
        # Without a number of batches, by the time alone.
        fraction = (
            self._done / self._batches if self._batches else min(1.0, elapsed / whole if whole else 1.0)
        )
        seconds = round(whole * (self._later + max(0.0, 1 - fraction)))
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"
