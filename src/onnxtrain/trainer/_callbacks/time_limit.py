"""Stops training before it exceeds a time limit."""

from __future__ import annotations

import math

from onnxtrain.errors import InputError
from onnxtrain.trainer._run.history import History
from onnxtrain.trainer._trainer import Callback, Trainer


class TimeLimit(Callback):
    """Ends a fit before an epoch that would exceed a time limit.

    The next epoch is expected to take as long as the slowest epoch of the fit so far. The first epoch is always
    trained. In a resumed fit, epochs before the interruption count towards the limit; the time in between does not.

    Args:
        seconds: time limit of the fit in seconds, e.g. 3600.
    """

    def __init__(self, seconds: float) -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise InputError(f"TimeLimit: seconds must be a positive number, received {seconds!r}.")
        self.seconds = seconds

    def on_epoch_end(self, trainer: Trainer, history: History) -> None:
        """Stops the fit if another epoch would exceed the time limit."""
        durations = history.seconds[trainer.fit_start :]
        if sum(durations) + max(durations) > self.seconds:
            trainer.stop_training()
