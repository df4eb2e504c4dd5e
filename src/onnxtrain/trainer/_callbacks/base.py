"""Defines the interface of callbacks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from onnxtrain.runtime.dtypes import Array
from onnxtrain.trainer._run.history import History

if TYPE_CHECKING:
    from onnxtrain.trainer._trainer import Trainer


class StepGradients(ABC):
    """Gradients of one optimizer step, which a callback may replace before the optimizer uses them."""

    @abstractmethod
    def values(self) -> dict[str, Array]:
        """Copies the gradients of the trained parameters, by name; those of half precision as float32.

        Raises:
            InputError: some gradients are sparse.
        """

    @abstractmethod
    def recompute_at(self, parameters: Mapping[str, Array]) -> None:
        """Replaces the gradients by those of the same batches at other values of parameters.

        Dropout drops the same elements again. Parameters and BatchNorm statistics are afterwards what they were
        before.

        Args:
            parameters: values by name, of the parameters' shapes; other parameters keep their values.

        Raises:
            DivergenceError: the loss or the gradients there are not finite. The fit ends.
        """


class Callback:
    """Base class of callbacks: override the methods that you need.

    A callback that decides from `trainer.history` rather than from its own attributes decides the same after
    the run has been resumed.
    """

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Called once, before the first step of a fit (or of its continuation)."""

    def on_gradients(self, trainer: Trainer, gradients: StepGradients) -> None:
        """Called when the gradients of a step are computed, before they are clipped and the optimizer uses them.

        The trainer's lock is held in the meantime: do not wait for another thread that uses the trainer.
        """

    def on_step_end(self, trainer: Trainer, loss: float) -> None:
        """Called after each optimizer step with the loss of its samples."""

    def on_evaluation(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Called after each evaluation in the middle of an epoch (`evaluate_every` of :meth:`Trainer.fit`).

        `values` is the last entry of `trainer.history.evaluations`, e.g. {"step": 50, "epoch": 2, "val_loss": 0.4}.
        """

    def on_epoch_end(self, trainer: Trainer, history: History) -> None:
        """Called after each epoch, whose entry is `history.last`; `trainer.stop_training()` ends the fit."""

    def on_fit_end(self, trainer: Trainer, history: History) -> None:
        """Called once at the end, also when the fit was stopped or interrupted."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Called in place of `on_fit_end` where a fit ends with an exception, which then goes on its way."""
