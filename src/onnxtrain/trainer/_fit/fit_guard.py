"""Ensures that a trainer runs only one fit at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from onnxtrain.errors import TrainingStateError
from onnxtrain.runtime.lock import StateLock


class FitGuard:
    """Records which thread runs a fit, and rejects calls that would interfere with the fit.

    Args:
        lock: the trainer's lock.
    """

    def __init__(self, lock: StateLock) -> None:
        self._lock = lock
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def fitting(self, averages_are_applied: bool) -> Iterator[None]:
        """Context manager that marks a fit as running.

        Args:
            averages_are_applied: True if moving averages currently replace the trained values.

        Raises:
            TrainingStateError: another fit is running, or moving averages replace the trained values.
        """
        with self._lock:
            self.require_no_fit("Trainer.fit()")
            if averages_are_applied:
                raise TrainingStateError(
                    "Trainer.fit() inside `with trainer.averaged():` would train the averages, and the "
                    "result would be lost at the end of the block. Leave the block first."
                )
            # The thread, not a flag: callbacks of the fit may make calls that other threads may not.
            self._thread = threading.current_thread()
        try:
            yield
        finally:
            self._thread = None

    def require_no_fit(self, doing: str, *, elsewhere: bool = False) -> None:
        """Raises TrainingStateError while a fit is running.

        Args:
            doing: name of the call, for error messages, e.g. "Trainer.fit()".
            elsewhere: True to allow the call in the fit's own thread, e.g. in a callback.
        """
        thread = self._thread
        if thread is None or (elsewhere and thread is threading.current_thread()):
            return
        where = f"in thread '{thread.name}'"
        if thread is threading.current_thread():
            where = "in this thread: perhaps a callback has called it"
        raise TrainingStateError(
            f"{doing}: a call to fit of this Trainer is running {where}. Wait until it returns "
            "(trainer.stop_training() ends it after the current epoch), or use another Trainer."
        )
