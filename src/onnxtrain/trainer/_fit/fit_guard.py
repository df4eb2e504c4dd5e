"""Allows one fit of a trainer at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from onnxtrain.errors import TrainingStateError
from onnxtrain.runtime.lock import StateLock


class FitGuard:
    """Records the thread that fits a trainer and refuses other uses that would disturb the fit.

    Args:
        lock: lock of the trainer.
    """

    def __init__(self, lock: StateLock) -> None:
        self._lock = lock
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def fitting(self, averages_are_applied: bool) -> Iterator[None]:
        """Marks a fit as under way until the block ends.

        Args:
            averages_are_applied: True if the moving averages have replaced the trained values.

        Raises:
            TrainingStateError: Another fit is under way, or the averages have replaced the trained values.
        """
        with self._lock:
            self.require_none("Trainer.fit()")
            if averages_are_applied:
                raise TrainingStateError(
                    "Trainer.fit() inside of `with trainer.averaged():` would train the averages, and lose what it has "
                    "trained at the end of the block. End the block first."
                )
            # The thread, not a flag: a callback of the fit may do what other threads may not.
            self._thread = threading.current_thread()
        try:
            yield
        finally:
            self._thread = None

    def require_none(self, doing: str, *, elsewhere: bool = False) -> None:
        """Raises TrainingStateError while a fit is under way.

        Args:
            doing: name of the refused call, for the message, e.g. "Trainer.fit()".
            elsewhere: allow the call in the thread of the fit, for callbacks.
        """
        thread = self._thread
        if thread is None or (elsewhere and thread is threading.current_thread()):
            return
        where = f"in thread '{thread.name}'"
        if thread is threading.current_thread():
            where = "in this thread: perhaps a callback has called it"
        raise TrainingStateError(
            f"{doing}: a fit of this Trainer is under way {where}. Wait for its end (trainer.stop_training() ends it "
            "after the current epoch), or use another Trainer."
        )
