"""Logs a run to MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from onnxtrain.trainer._callbacks.logger import Logger, saved_id
from onnxtrain.trainer._optional import optional
from onnxtrain.trainer._run.history import History
from onnxtrain.trainer._trainer import Trainer

PROPERTY = "onnxtrain.mlflow"
"""Checkpoint property with the id of the MLflow run, which a resumed trainer continues."""

# Maximum length of a parameter's value in MLflow 2 and 3; longer values are errors.
_LONGEST = 500


class MLflowLogger(Logger):
    """Logs to MLflow: `step/loss`, `step/learning_rate`, and `epoch/...` for the keys of the history.

    The x axis is the number of optimizer steps. The settings of the trainer and of the fit are logged as parameters of
    the MLflow run. The MLflow run's id is saved with the trainer: a resumed trainer continues the same MLflow run and
    logs no step twice. If an MLflow run is active (`mlflow.start_run`), the logger uses it and does not end it.

    Args:
        experiment: name of the experiment, created if missing; None for the current one.
        name: name of the run.
        every_n_steps: log every n-th step; None logs only epochs.
        tracking_uri: server or database, e.g. "sqlite:///mlflow.db"; None for the current one.
        parameters: additional parameters of the run.
        tags: tags of the run.

    Raises:
        MissingPackageError: mlflow is not installed.
    """

    def __init__(
        self,
        experiment: str | None = None,
        name: str | None = None,
        *,
        every_n_steps: int | None = 1,
        tracking_uri: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(every_n_steps)
        self._mlflow = optional("mlflow", "MLflowLogger", "'onnxtrain[mlflow]'")
        self._experiment = experiment
        self._name = name
        self._uri = tracking_uri
        self._parameters = dict(parameters or {})
        self._tags = dict(tags or {})
        self._client: Any = None
        self._run = ""
        self._own = False
        # Last logged step of each kind of value, e.g. {"step": 40, "epoch": 30}.
        self._logged: dict[str, int] = {}

    def open(self, trainer: Trainer) -> None:
        """Starts an MLflow run, or continues the run whose id is saved with the trainer."""
        self.close()
        properties, active = trainer.state.properties, self._mlflow.active_run()
        self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        self._own = active is None
        if active is not None:
            self._run = active.info.run_id
        elif (saved := saved_id(trainer, PROPERTY)) is not None:
            self._run = saved
            # The status is still RUNNING if the process was killed, and FINISHED otherwise.
            self._client.update_run(self._run, status="RUNNING")
        else:
            self._run = self._client.create_run(
                self._experiment_id(), tags=self._tags, run_name=self._name
            ).info.run_id
        properties[PROPERTY] = self._run
        self._logged = {
            "step": self._last("step/loss"),
            "evaluation": self._last("step/val_loss"),
            "epoch": self._last("epoch/loss"),
        }
        self._log_parameters(trainer)

    def _experiment_id(self) -> str:
        """Returns the id of the experiment; creates it if missing."""
        if self._experiment is None:
            # The experiment chosen by `mlflow.set_experiment`, or the default one.
            return str(self._mlflow.tracking.fluent._get_experiment_id())
        experiment = self._client.get_experiment_by_name(self._experiment)
        return str(
            experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        )

    def _last(self, key: str) -> int:
        """Returns the last step at which the metric `key` was logged; -1 if it never was."""
        return max((metric.step for metric in self._client.get_metric_history(self._run, key)), default=-1)

    def _log_parameters(self, trainer: Trainer) -> None:
        """Logs the settings that are not yet parameters of the MLflow run."""
        # MLflow refuses to change a parameter, and a second fit may have other arguments.
        known = self._client.get_run(self._run).data.params
        settings = {**trainer._state.run_settings, **self._parameters}
        parameters = [
            self._mlflow.entities.Param(name, str(value)[:_LONGEST])
            for name, value in settings.items()
            if name not in known
        ]
        self._client.log_batch(self._run, params=parameters)

    def log_step(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Logs the values of a step."""
        self._log("step", "step", trainer, values)

    def log_evaluation(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Logs the values of an evaluation in the middle of an epoch."""
        measured = {key: value for key, value in values.items() if key.startswith("val_")}
        self._log("evaluation", "step", trainer, measured)

    def log_epoch(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Logs the values of an epoch."""
        self._log("epoch", "epoch", trainer, values)

    def _log(self, kind: str, prefix: str, trainer: Trainer, values: Mapping[str, float]) -> None:
        step = trainer.global_step
        # MLflow keeps every value: a step repeated after a crash would be logged twice.
        if step <= self._logged[kind]:
            return
        self._logged[kind] = step
        now = int(time.time() * 1000)
        metrics = [
            self._mlflow.entities.Metric(f"{prefix}/{key}", float(value), now, step)
            for key, value in values.items()
        ]
        self._client.log_batch(self._run, metrics=metrics)

    def on_fit_end(self, trainer: Trainer, history: History) -> None:
        """Ends the MLflow run, with status KILLED if the fit was interrupted."""
        self._end("KILLED" if history.stopped == "interrupted" else "FINISHED")

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Ends the MLflow run with status FAILED."""
        self._end("FAILED")

    def close(self) -> None:
        """Ends the MLflow run if this logger started it."""
        self._end("FINISHED")

    def _end(self, status: str) -> None:
        if self._client is not None and self._own:
            self._client.set_terminated(self._run, status)
        self._client = None
