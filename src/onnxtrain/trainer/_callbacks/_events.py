"""Calls all callbacks of a fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from onnxtrain.errors import InputError
from onnxtrain.trainer._callbacks._base import Callback, StepGradients
from onnxtrain.trainer._callbacks._early_stopping import EarlyStopping
from onnxtrain.trainer._history import History

if TYPE_CHECKING:
    from onnxtrain.trainer._trainer import Trainer


class Events:
    """Calls the callbacks of a fit in their order."""

    def __init__(self, callbacks: Sequence[Callback], trainer: Trainer) -> None:
        self._callbacks = callbacks
        self._trainer = trainer
        # Without such a callback a step does not wait for copies of its gradients.
        self._with_gradients = [c for c in callbacks if type(c).on_gradients is not Callback.on_gradients]

    @property
    def wants_gradients(self) -> bool:
        """True if a callback overrides :meth:`Callback.on_gradients`."""
        return bool(self._with_gradients)

    def gradients(self, gradients: StepGradients) -> None:
        """Calls :meth:`Callback.on_gradients`."""
        for callback in self._with_gradients:
            callback.on_gradients(self._trainer, gradients)

    def fit_begin(self) -> None:
        """Calls :meth:`Callback.on_fit_begin`."""
        for callback in self._callbacks:
            callback.on_fit_begin(self._trainer)

    def step_end(self, loss: float) -> None:
        """Calls :meth:`Callback.on_step_end`."""
        for callback in self._callbacks:
            callback.on_step_end(self._trainer, loss)

    def epoch_end(self, history: History) -> None:
        """Calls :meth:`Callback.on_epoch_end`."""
        for callback in self._callbacks:
            callback.on_epoch_end(self._trainer, history)

    def fit_end(self, history: History) -> None:
        """Calls :meth:`Callback.on_fit_end`."""
        for callback in self._callbacks:
            callback.on_fit_end(self._trainer, history)

    def exception(self, error: BaseException) -> None:
        """Calls :meth:`Callback.on_exception`."""
        for callback in self._callbacks:
            callback.on_exception(self._trainer, error)


def callback_list(callbacks: Iterable[Callback] | None) -> list[Callback]:
    """Checks the callbacks of a fit; returns them as a list."""
    if callbacks is None:
        return []
    # A generator of callbacks is used up by the first look at it.
    given = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
    if not all(isinstance(entry, Callback) for entry in given) or isinstance(callbacks, Callback):
        received = ", ".join(type(entry).__name__ for entry in given)
        raise InputError(f"callbacks must be a list of callbacks, received {received}.")
    # Both would write the file `best`, and both would restore its parameters.
    if sum(isinstance(entry, EarlyStopping) and entry.restore_best for entry in given) > 1:
        raise InputError("Only one EarlyStopping can have restore_best=True: there is one set of parameters.")
    return given
