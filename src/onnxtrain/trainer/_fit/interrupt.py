"""Handles Ctrl-C during training: the first finishes the step, the second interrupts immediately."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class InterruptGuard:
    """Context manager in which the first Ctrl-C sets :attr:`requested`, and a second one raises KeyboardInterrupt.

    Python handles signals in the main thread only; in other threads, the guard does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: signal._HANDLER = None
        self._installed = False

    def __enter__(self) -> InterruptGuard:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(self, *error: object) -> None:
        if self._installed:
            # None is a handler that was not installed from Python, which Python cannot restore.
            signal.signal(
                signal.SIGINT, signal.default_int_handler if self._previous is None else self._previous
            )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A second Ctrl-C does not wait for a long step.
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
