"""Calls all callbacks of a fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from onnxtrain.errors import InputError
from onnxtrain.trainer._callbacks.base import Callback
from onnxtrain.trainer._callbacks.checkpoint import ModelCheckpoint
from onnxtrain.trainer._callbacks.early_stopping import EarlyStopping
from onnxtrain.trainer._callbacks.swa import SWA

if TYPE_CHECKING:
    from onnxtrain.trainer._trainer import Trainer


P = ParamSpec("P")


class Events:
    """Calls the callbacks of a fit in their order.

    Attributes:
        wants_gradients: True if a callback overrides :meth:`Callback.on_gradients`.
    """

    def __init__(self, callbacks: Sequence[Callback], trainer: Trainer) -> None:
        self._callbacks = callbacks
        self._trainer = trainer
        # Without such a callback a step does not wait for copies of its gradients.
        self.wants_gradients = any(type(c).on_gradients is not Callback.on_gradients for c in callbacks)

    def saves(self, step: int) -> bool:
        """Returns True if a :class:`ModelCheckpoint` saves after this step."""
        every = (c.every_n_steps for c in self._callbacks if isinstance(c, ModelCheckpoint))
        return any(number is not None and step % number == 0 for number in every)

    def call(
        self, method: Callable[Concatenate[Any, Trainer, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Calls a method of all callbacks, e.g. `events.call(Callback.on_step_end, loss)`."""
        for callback in self._callbacks:
            getattr(callback, method.__name__)(self._trainer, *args, **kwargs)


def callback_list(callbacks: Iterable[Callback] | None) -> list[Callback]:
    """Checks the callbacks of a fit; returns them as a list."""
    if callbacks is None:
        return []
    # A generator of callbacks is used up by the first look at it.
    listed = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
    if not all(isinstance(entry, Callback) for entry in listed) or isinstance(callbacks, Callback):
        received = ", ".join(type(entry).__name__ for entry in listed)
        raise InputError(f"callbacks must be a list of callbacks, received {received}.")
    # Both would write the file `best`, and both would restore its parameters.
    if sum(isinstance(entry, EarlyStopping) and entry.restore_best for entry in listed) > 1:
        raise InputError("Only one EarlyStopping can have restore_best=True: there is one set of parameters.")
    if any(isinstance(entry, SWA) for entry in listed) and any(
        isinstance(entry, EarlyStopping) and entry.restore_best for entry in listed
    ):
        raise InputError(
            "SWA and EarlyStopping(restore_best=True) both set the parameters at the end. Choose one."
        )
    return listed
