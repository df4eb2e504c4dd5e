"""Runs the callbacks of a fit on worker 0, while the other workers wait and take part in its saves."""

from __future__ import annotations

from typing import Any, NamedTuple

from onnxtrain.errors import WorkersError
from onnxtrain.trainer._fit.events import Event, Events
from onnxtrain.trainer._fit.state import TrainingState
from onnxtrain.trainer._workers.group import WorkerGroup

# Callbacks such as EarlyStopping and SWA set parameters in these, which are broadcast afterwards.
_MAY_SET_PARAMETERS = ("on_fit_begin", "on_epoch_end", "on_fit_end")
# The workers agree on the end of the fit at these, even without callbacks.
_MAY_STOP = ("on_epoch_end", "on_fit_end")


class _Decisions(NamedTuple):
    """State that callbacks on worker 0 may have changed.

    Attributes:
        failure: text of the exception that a callback raised; None if there was none.
        learning_rate: learning rate before the schedule's factor.
        stopped: value of `history.stopped`.
        averaged: number of steps in the moving averages; 0 after new parameters were loaded.
    """

    failure: str | None
    learning_rate: float
    stopped: str | None
    averaged: int


class WorkerEvents(Events):
    """Calls callbacks on worker 0 only, except for `on_gradients`, which all workers call together.

    Args:
        events: object that calls the callbacks in this process; all workers have the same callbacks.
        workers: the group of workers.
        state: state of this worker's trainer.
    """

    def __init__(self, events: Events, workers: WorkerGroup, state: TrainingState) -> None:
        self._events = events
        self._workers = workers
        self._state = state

    def handles(self, event: Event) -> bool:
        return self._events.handles(event)

    def saves(self, step: int) -> bool:
        return self._events.saves(step)

    def call(self, event: Event, *arguments: Any) -> None:
        """Calls the callbacks, then broadcasts the state that they may have changed."""
        # All workers see the same summed gradients, and a callback such as SAM has all of them recompute.
        if event == "on_gradients":
            self._events.call(event, *arguments)
            return
        # This worker's fit ends here; the others may still be running, so there must be no collective call.
        if event == "on_exception":
            if self._workers.leads:
                with self._workers.alone():
                    self._events.call(event, *arguments)
            return
        if event in _MAY_STOP and any(self._workers.communicator.gather(self._workers.stop_asked)):
            self._workers.stop_asked = False
            self._state.position.history.stopped = "early"
        if not self.handles(event):
            return
        if self._workers.leads:
            self._lead(event, *arguments)
        else:
            self._follow()
        if event in _MAY_SET_PARAMETERS:
            self._workers.broadcast_parameters(self._state.run.store)

    def _lead(self, event: Event, *arguments: Any) -> None:
        """Runs the callbacks on worker 0, then broadcasts the state they may have changed."""
        position, failure = self._state.position, None
        try:
            with self._workers.alone():
                self._events.call(event, *arguments)
            if self._workers.stop_asked:
                self._workers.stop_asked = False
                position.history.stopped = "early"
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            stopped = position.history.stopped
            told = _Decisions(failure, position.learning_rate, stopped, position.averaged)
            self._workers.communicator.share(("done", *told))

    def _follow(self) -> None:
        """Waits for the callbacks on worker 0, then applies their changes to this worker's state."""
        told = _Decisions(*self._workers.serve(self._state.run.store))
        if told.failure is not None:
            raise WorkersError(f"A callback failed on worker 0: {told.failure}")
        position = self._state.position
        position.learning_rate, position.averaged = told.learning_rate, told.averaged
        position.history.stopped = told.stopped
