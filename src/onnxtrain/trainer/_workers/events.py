"""Calls the callbacks of a fit on several workers: on the leader, while the others wait and help it to save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec

from onnxtrain.errors import WorkersError
from onnxtrain.trainer._callbacks import Callback, Events

if TYPE_CHECKING:
    from onnxtrain.trainer._fit.state import TrainingState
    from onnxtrain.trainer._trainer import Trainer
    from onnxtrain.trainer._workers.group import Workers

P = ParamSpec("P")

# After these the leader's parameters replace those of the others: callbacks such as EarlyStopping and SWA set them.
_MAY_SET_PARAMETERS = ("on_fit_begin", "on_epoch_end", "on_fit_end")
# At these the workers agree on the end of the fit, also without callbacks.
_MAY_STOP = ("on_epoch_end", "on_fit_end")


class _Decisions(NamedTuple):
    """State that callbacks of the leader may have changed.

    Attributes:
        failure: text of the exception that a callback raised; None if there was none.
        learning_rate: learning rate before the schedule's factor.
        stopped: value of `history.stopped`.
        averaged: steps in the moving averages; 0 after new parameters were loaded.
    """

    failure: str | None
    learning_rate: float
    stopped: str | None
    averaged: int


class WorkerEvents(Events):
    """Calls callbacks on the leader alone, but for `on_gradients`, which takes part in the computation.

    Args:
        callbacks: the callbacks, the same on all workers.
        trainer: the trainer of this worker.
        workers: the workers.
        state: the state of the trainer.
    """

    def __init__(
        self, callbacks: Sequence[Callback], trainer: Trainer, workers: Workers, state: TrainingState
    ) -> None:
        super().__init__(callbacks, trainer)
        self._workers = workers
        self._state = state

    def call(
        self, method: Callable[Concatenate[Any, Trainer, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Calls a method of all callbacks; afterwards the workers agree on what the callbacks have changed."""
        name = method.__name__
        # All workers see the same summed gradients, and a callback such as SAM makes all of them compute again.
        if name == "on_gradients":
            super().call(method, *args, **kwargs)
            return
        # The fit of this worker ends; the others may be ending or not.
        if name == "on_exception":
            if self._workers.leads:
                with self._workers.alone():
                    super().call(method, *args, **kwargs)
            return
        if name in _MAY_STOP and any(self._workers.communicator.gather(self._workers.stop_asked)):
            self._workers.stop_asked = False
            self._state.position.history.stopped = "early"
        # Without a callback for it nobody waits.
        called = any(getattr(type(callback), name) is not method for callback in self._callbacks)
        if not called:
            return
        if self._workers.leads:
            self._lead(method, *args, **kwargs)
        else:
            self._follow()
        if name in _MAY_SET_PARAMETERS:
            self._workers.broadcast_parameters(self._state.run.store)

    def _lead(
        self, method: Callable[Concatenate[Any, Trainer, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Calls the callbacks, and tells the others at the end what has changed."""
        position, failure = self._state.position, None
        try:
            with self._workers.alone():
                super().call(method, *args, **kwargs)
            if self._workers.stop_asked:
                self._workers.stop_asked = False
                position.history.stopped = "early"
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            history = position.history
            told = _Decisions(failure, position.learning_rate, history.stopped, position.averaged)
            self._workers.communicator.share(("done", *told))

    def _follow(self) -> None:
        """Waits for the leader's callbacks, and takes over what they have changed."""
        told = _Decisions(*self._workers.serve(self._state.run.store))
        if told.failure is not None:
            raise WorkersError(f"A callback failed on worker 0: {told.failure}")
        position = self._state.position
        position.learning_rate, position.averaged = told.learning_rate, told.averaged
        position.history.stopped = told.stopped
