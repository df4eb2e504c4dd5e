"""Handles Ctrl-C during training: the first one finishes the step, the second one interrupts at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class InterruptGuard:
    """While entered, turns the first Ctrl-C into :attr:`requested`; a second one raises KeyboardInterrupt.

    Python handles signals in the main thread only; in another thread the guard does nothing.
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
            # None stands for a handler that was not installed from Python, which Python cannot install again.
            signal.signal(
                signal.SIGINT, signal.default_int_handler if self._previous is None else self._previous
            )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A second Ctrl-C is for users who do not want to wait for a long step.
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
