"""Logs a run to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxtrain.trainer._callbacks.logger import Logger, saved_id
from onnxtrain.trainer._optional import optional
from onnxtrain.trainer._trainer import Trainer

PROPERTY = "onnxtrain.wandb"
"""Checkpoint property with the id of the Weights & Biases run, which a resumed trainer continues."""


class WandbLogger(Logger):
    """Logs to Weights & Biases: `step/loss`, `step/learning_rate`, and `epoch/...` for the keys of the history.

    The x axis is the number of optimizer steps. The settings of the trainer and of the fit are logged as the run's
    config. The run's id is saved with the trainer: a resumed trainer continues the same run and logs no step twice. If
    a run is active (`wandb.init`), the logger uses it and does not finish it.

    Args:
        project: name of the Weights & Biases project.
        name: name of the run.
        every_n_steps: log every n-th step; None logs only epochs.
        config: additional entries of the run's config.
        options: additional arguments for `wandb.init`, e.g. `entity`, `tags` or `mode="offline"`.

    Raises:
        MissingPackageError: wandb is not installed.
    """

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        *,
        every_n_steps: int | None = 1,
        config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(every_n_steps)
        self._wandb = optional("wandb", "WandbLogger", "wandb")
        self._options = {"project": project, "name": name, **options}
        self._config = dict(config or {})
        self._run: Any = None
        self._own = False
        self._first = 0

    def open(self, trainer: Trainer) -> None:
        """Starts a Weights & Biases run, or continues the run whose id is saved with the trainer."""
        self.close()
        properties = trainer.state.properties
        self._run, self._own = self._wandb.run, self._wandb.run is None
        if self._own:
            options = dict(self._options)
            # "allow", because the run may have been deleted on the server, or logged offline.
            if (saved := saved_id(trainer, PROPERTY)) is not None:
                options |= {"id": saved, "resume": "allow"}
            self._run = self._wandb.init(config={**trainer._state.run_settings, **self._config}, **options)
        properties[PROPERTY] = str(self._run.id)
        # Weights & Biases ignores steps that it has already, with a warning for each.
        self._first = int(self._run.starting_step)

    def log_step(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Logs the values of a step."""
        self._log("step", trainer, values)

    def log_epoch(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Logs the values of an epoch."""
        self._log("epoch", trainer, values)

    def log_evaluation(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Logs the values of an evaluation in the middle of an epoch."""
        self._log("step", trainer, {key: value for key, value in values.items() if key.startswith("val_")})

    def _log(self, prefix: str, trainer: Trainer, values: Mapping[str, float]) -> None:
        if trainer.global_step >= self._first:
            # Lets Weights & Biases plot values over epochs as well as over steps.
            named = {f"{prefix}/{key}" if key != "epoch" else key: value for key, value in values.items()}
            self._run.log(named, step=trainer.global_step)

    def close(self) -> None:
        """Finishes the run if this logger started it."""
        if self._run is not None and self._own:
            self._run.finish()
        self._run = None
