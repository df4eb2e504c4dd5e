"""Lets Optuna prune unpromising trials."""

from __future__ import annotations

from typing import Any

from onnxtrain.errors import InputError
from onnxtrain.trainer._callbacks.monitor import Mode, Monitor
from onnxtrain.trainer._optional import optional
from onnxtrain.trainer._run.history import History
from onnxtrain.trainer._trainer import Trainer


class OptunaPruning(Monitor):
    """Reports a value to an Optuna trial after each epoch, and ends the fit if the pruner prunes the trial.

    A pruned fit raises `optuna.TrialPruned`, which `study.optimize` records as a pruned trial. The trial's steps are
    epochs of the fit, counted from 0, as Optuna's `n_warmup_steps` assumes.

    Args:
        trial: `optuna.Trial` passed to the objective function.
        monitor: recorded value to report, e.g. "val_loss" or "val_f1".
        mode: "min" if lower values are better, "max" if higher values are better. "auto" works for the loss and for
            metrics given by name; for metrics given as functions, pass "min" or "max". Must match the direction of the
            study.

    Raises:
        MissingPackageError: optuna is not installed.
        InputError: raised when a fit begins: the value is not recorded, or the study has the opposite direction.

    Example:
        Tune the learning rate::

            def objective(trial):
                rate = trial.suggest_float("learning_rate", 1e-5, 1e-1, log=True)
                trainer = Trainer("model.onnx", "cross_entropy", learning_rate=rate)
                trainer.fit(x, y, epochs=20, validation=0.2, callbacks=[OptunaPruning(trial)])
                return trainer.history["val_loss"][-1]


            study = optuna.create_study(direction="minimize", pruner=optuna.pruners.MedianPruner())
            study.optimize(objective, n_trials=50)
    """

    def __init__(self, trial: Any, monitor: str = "val_loss", mode: Mode = "auto") -> None:
        super().__init__(monitor, mode)
        self._optuna = optional("optuna", "OptunaPruning", "'onnxtrain[optuna]'")
        self.trial = trial

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Checks that the value will be recorded, and that its direction matches the study's direction."""
        super().on_fit_begin(trainer)
        # A FixedTrial has no study.
        study = getattr(self.trial, "study", None)
        if study is None:
            return
        rises = self._rises(trainer)
        wanted = "maximize" if rises else "minimize"
        # Otherwise the pruner would end the best trials.
        if study.direction.name.lower() != wanted:
            raise InputError(
                f"OptunaPruning: {'higher' if rises else 'lower'} values of '{self.monitor}' are better, "
                f"but the direction of the study is {study.direction.name}. Pass direction='{wanted}' to "
                "create_study, or another monitor."
            )

    def on_epoch_end(self, trainer: Trainer, history: History) -> None:
        """Reports the value to the trial.

        Raises:
            TrialPruned: the pruner ends the trial.
        """
        epoch = len(history) - trainer.fit_start
        self.trial.report(history.last[self.monitor], epoch - 1)
        if self.trial.should_prune():
            # An exception, not an interruption: a pruned fit is not resumed.
            raise self._optuna.TrialPruned(f"Pruned after epoch {epoch}.")
