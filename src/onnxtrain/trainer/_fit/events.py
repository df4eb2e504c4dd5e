"""Defines the interface between a fit and its callbacks: events, and the gradients of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from onnxtrain.runtime.dtypes import Array

Event = Literal[
    "on_fit_begin",
    "on_gradients",
    "on_step_end",
    "on_evaluation",
    "on_epoch_end",
    "on_fit_end",
    "on_exception",
]
"""Name of the method of `Callback` that handles the event."""


class Events(Protocol):
    """Receives the events of a fit."""

    def handles(self, event: Event) -> bool:
        """True if a callback overrides the event's method."""

    def saves(self, step: int) -> bool:
        """True if a callback saves the run after optimizer step `step`."""

    def call(self, event: Event, *arguments: Any) -> None:
        """Calls the event's method on all callbacks, e.g. `call("on_step_end", loss)`."""


class StepGradients(ABC):
    """Gradients of one optimizer step; a callback may replace them before the optimizer uses them."""

    @abstractmethod
    def values(self) -> dict[str, Array]:
        """Returns copies of the gradients by parameter name; half-precision gradients are converted to float32.

        Raises:
            InputError: some gradients are sparse.
        """

    @abstractmethod
    def recompute_at(self, parameters: Mapping[str, Array]) -> None:
        """Replaces the gradients with the gradients of the same batches at the given parameter values.

        Dropout uses the same masks again. The call does not change the parameters or the BatchNorm statistics.

        Args:
            parameters: values by parameter name, with the parameters' shapes; parameters that are not in the dict keep
                their values.

        Raises:
            DivergenceError: the loss or the gradients at these values are not finite; this ends the fit.
        """
