"""Stops training as `early_stopping` of scikit-learn's perceptrons does."""

from __future__ import annotations

import math
from collections.abc import Callable

from onnxtrain.trainer import Callback, History, Trainer
from onnxtrain.trainer._run.files import BEST


class ScoreStopping(Callback):
    """Stops training when a score has not improved for some epochs, and restores the best parameters.

    As in scikit-learn, an epoch counts as an improvement if it is better than the best one by at least `tol`, but the
    best parameters are those of the highest score, whatever the difference.

    Args:
        score: function that returns the score of a trainer after an epoch; higher is better.
        patience: the fit ends after more than this number of consecutive epochs without improvement.
        tol: smallest improvement.

    Attributes:
        scores: score after each epoch.
        best: highest score; minus infinity before the first epoch.
    """

    def __init__(self, score: Callable[[Trainer], float], patience: int, tol: float) -> None:
        self._score = score
        self._patience = patience
        self._tol = tol
        self._waited = 0
        self.scores: list[float] = []
        self.best = -math.inf

    def _sets_parameters_at_end(self) -> str | None:
        return "early_stopping"

    def on_epoch_end(self, trainer: Trainer, history: History) -> None:
        """Scores the epoch, saves the best parameters, and stops the fit."""
        score = self._score(trainer)
        self.scores.append(score)
        self._waited = self._waited + 1 if score < self.best + self._tol else 0
        if score > self.best:
            self.best = score
            trainer.save_parameters(trainer.directory / BEST)
        if self._waited > self._patience:
            trainer.stop_training()

    def on_fit_end(self, trainer: Trainer, history: History) -> None:
        """Restores the best parameters."""
        if (trainer.directory / BEST).is_file():
            trainer.load_parameters(trainer.directory / BEST)
