"""Ctrl-C during training: finish the step, save, return."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class InterruptGuard:
    """While entered, the first Ctrl-C sets :attr:`requested`, and a second one interrupts as usual.

    Signals reach Python in the main thread only; entered in another thread it does nothing.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._installed:
            # None: the previous handler was not installed from Python and cannot be put back from here.
            signal.signal(
                signal.SIGINT, signal.default_int_handler if self._previous is None else self._previous
            )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
