"""Defines the properties of `Trainer`: views of its state, and the few settings that may change during training."""

from __future__ import annotations

from pathlib import Path

from onnxtrain.runtime.lock import StateLock
from onnxtrain.runtime.manifest import Manifest
from onnxtrain.runtime.optimizer import check_learning_rate
from onnxtrain.runtime.state import CheckpointState, Parameters
from onnxtrain.runtime.uncopied import Uncopied
from onnxtrain.trainer._fit.state import TrainingState
from onnxtrain.trainer._metrics.metrics import Metric
from onnxtrain.trainer._run.history import History
from onnxtrain.trainer._run.position import Plan


class TrainerProperties(Uncopied):
    """Properties of :class:`Trainer`, which sets `_state`."""

    _instead = "Save it by trainer.save(path), and open a second one of its own by Trainer.resume(path)."

    _state: TrainingState

    @property
    def directory(self) -> Path:
        """Directory of the run's files."""
        return self._state.directory

    @property
    def state(self) -> CheckpointState:
        """Parameters, statistics and properties, for `onnxtrain.api`."""
        return self._state.run.state

    @property
    def lock(self) -> StateLock:
        """Lock that keeps other threads from using the trainer, and a fit from going on, while a thread holds it.

        Hold it (`with trainer.lock:`) to read several of :attr:`parameters`, which are live views, while another
        thread fits.
        """
        return self._state.lock

    @property
    def parameters(self) -> Parameters:
        """Parameters by name; `.data` is a live view."""
        return self._state.run.state.parameters

    @property
    def manifest(self) -> Manifest:
        """Inputs, targets and outputs of the training model, and its optimizer."""
        return self._state.run.manifest

    @property
    def history(self) -> History:
        """Record of all epochs so far."""
        return self._state.position.history

    @property
    def outputs(self) -> list[str]:
        """Names of the model's own outputs, which :meth:`predict` returns and :meth:`export` keeps."""
        return list(self._state.run.predicted)

    @property
    def resumes_fit(self) -> bool:
        """True if the next fit goes on with one that was interrupted."""
        return self._state.position.unfinished

    @property
    def last_fit(self) -> Plan | None:
        """Arguments of the last fit, or of the one that was interrupted; None before the first one."""
        return self._state.position.plan

    @property
    def resume_hint(self) -> str:
        """Sentence about going on, shown after Ctrl-C; `{}` stands for the directory."""
        return self._state.resume_hint

    @resume_hint.setter
    def resume_hint(self, text: str) -> None:
        self._state.resume_hint = text

    @property
    def metrics(self) -> list[Metric]:
        """Metrics that are recorded beside the loss."""
        return self._state.metrics

    @property
    def positive(self) -> int | None:
        """Class that f1, precision, recall and auroc measure; None for the default of :class:`Trainer`."""
        return self._state.settings.positive

    @property
    def loss_name(self) -> str:
        """Name of the loss's class, e.g. "CrossEntropyLoss"; empty for the model's own loss."""
        return self._state.settings.loss

    @property
    def prediction(self) -> str | None:
        """Name of the output that metrics compare with the target; None if there is none."""
        return self._state.settings.prediction

    @property
    def fit_start(self) -> int:
        """Number of epochs that were finished when the fit under way, or the last one, began."""
        return self._state.position.fit_start

    @property
    def recorded_keys(self) -> list[str]:
        """Keys that the fit under way records for each epoch, e.g. ["loss", "accuracy", "val_loss"]."""
        return self._state.recorded_keys

    @property
    def learning_rate(self) -> float:
        """Learning rate before the schedule's factor; setting it takes effect at the next step."""
        return self._state.position.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._state.position.learning_rate = check_learning_rate(value)

    @property
    def current_learning_rate(self) -> float:
        """Learning rate of the last step, with the schedule's factor."""
        return self._state.run.optimizer.get_learning_rate()

    @property
    def global_step(self) -> int:
        """Number of optimizer steps that all fits together have taken."""
        return self._state.position.step
