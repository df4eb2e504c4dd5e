"""Stochastic weight averaging (SWA)."""

from __future__ import annotations

import math

from onnxtrain._words import argument
from onnxtrain.errors import InputError
from onnxtrain.runtime.atomic import FileSet
from onnxtrain.runtime.optimizer import check_learning_rate
from onnxtrain.trainer._checks import check_integer
from onnxtrain.trainer._fit.moving_average import MovingAverage
from onnxtrain.trainer._fit.renew_statistics import renew_statistics
from onnxtrain.trainer._run.files import SWA_AVERAGE
from onnxtrain.trainer._run.history import History
from onnxtrain.trainer._run.position import Plan
from onnxtrain.trainer._trainer import Callback, Trainer


class SWA(Callback):
    """Stochastic weight averaging: averages the parameters of a fit's last epochs (Izmailov et al. 2018).

    SWA finds wider minima, which often generalize better. All averaged epochs have the same weight, as in
    `torch.optim.swa_utils.AveragedModel`. At the end of the fit, the averages become the trainer's parameters, and the
    running statistics of BatchNormalization are recomputed in a pass over the training data, as in
    `swa_utils.update_bn`. The losses and metrics in the history are computed before averaging; to evaluate the
    averages, call :meth:`Trainer.evaluate` after the fit.

    During the fit, the averages are in the file `swa` in the trainer's directory, from which an interrupted fit
    resumes.

    Args:
        start: first epoch to average: an int is the number of the epoch in the fit, counted from 1, e.g. 16; a float is
            the fraction of the fit's epochs to skip, e.g. 0.75.
        learning_rate: learning rate of the averaged epochs, e.g. 0.05, multiplied by the schedule's factor. None keeps
            the learning rate.

    Raises:
        InputError: an argument is out of range.

    Example:
        >>> from onnxtrain.trainer import SWA
        >>> SWA(start=0.5, learning_rate=0.01).start
        0.5
    """

    def __init__(self, start: float | int = 0.75, learning_rate: float | None = None) -> None:
        if isinstance(start, float):
            if not 0 <= start < 1:
                raise InputError(f"SWA: start must be an epoch or a fraction in [0, 1), received {start!r}.")
        else:
            start = check_integer("SWA: start", start)
        self.start = start
        self.learning_rate = None if learning_rate is None else check_learning_rate(learning_rate)
        self._average: MovingAverage | None = None
        # Number of averaged epochs, and the last of them.
        self._count = self._last = 0

    def _sets_parameters_at_end(self) -> str:
        return "SWA"

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Starts a new average or, in a resumed fit, loads the saved average."""
        state = trainer._state
        if state.average is not None:
            raise InputError(
                f"SWA and {argument('ema_decay')} both replace the parameters by averages. Choose one."
            )
        # A stream may be readable only once, and its order is not known in advance.
        if (
            state.run.store.statistics
            and state.training_data is not None
            and state.training_data.samples is None
        ):
            raise InputError(
                "SWA reads the data once more to recompute the statistics of BatchNormalization, but a "
                "stream can be read only once. Pass arrays, a frame or a dataset."
            )
        self._average, self._count, self._last = MovingAverage(state.run.store), 0, 0
        first, averaged_from = self._first(trainer), None
        path = trainer.directory / SWA_AVERAGE
        if len(trainer.history) == trainer.fit_start:
            path.unlink(missing_ok=True)
        elif path.is_file():
            notes = self._average.read(path)
            # The file may belong to an earlier fit, if this one was started without SWA.
            if notes.get("fit_start") == str(trainer.fit_start):
                self._count, self._last = int(notes["count"]), int(notes["last"])
                averaged_from = int(notes.get("first", first))
        # Epochs that are done can neither be added to an average nor taken out of it.
        missed = self._done(trainer) >= first and averaged_from is None and isinstance(self.start, float)
        if missed or averaged_from not in (None, first):
            raise InputError(
                f"SWA: with {argument('epochs', self._plan(trainer).epochs)} the average begins with epoch {first} of "
                f"this fit, but epoch {self._done(trainer)} is done, and the average "
                f"{'has not begun' if averaged_from is None else f'began with epoch {averaged_from}'}. Resume the fit "
                "with the number of epochs that it had."
            )
        self._set_rate(trainer)

    def _first(self, trainer: Trainer) -> int:
        """Returns the first epoch to average, counted from 1 in the fit."""
        if not isinstance(self.start, float):
            return self.start
        return math.floor(self.start * self._plan(trainer).epochs) + 1

    @staticmethod
    def _plan(trainer: Trainer) -> Plan:
        plan = trainer.last_fit
        assert plan is not None
        return plan

    def _set_rate(self, trainer: Trainer) -> None:
        if self.learning_rate is not None and self._done(trainer) + 1 >= self._first(trainer):
            trainer.learning_rate = self.learning_rate

    @staticmethod
    def _done(trainer: Trainer) -> int:
        return len(trainer.history) - trainer.fit_start

    def on_epoch_end(self, trainer: Trainer, history: History) -> None:
        """Adds the parameters to the average, starting with the epoch that `start` selects."""
        epoch = self._done(trainer)
        self._set_rate(trainer)
        # An epoch that is repeated after a crash, with identical results, is in the average already.
        if epoch < self._first(trainer) or epoch <= self._last:
            return
        assert self._average is not None
        with trainer.lock:
            self._average.update(1 / (self._count + 1))
        self._count, self._last = self._count + 1, epoch
        with FileSet(trainer.directory) as files, files.open(SWA_AVERAGE) as file:
            notes = {
                "count": self._count,
                "last": self._last,
                "first": self._first(trainer),
                "fit_start": trainer.fit_start,
            }
            self._average.write(file, **{name: str(number) for name, number in notes.items()})

    def on_fit_end(self, trainer: Trainer, history: History) -> None:
        """Replaces the parameters with their averages, unless the fit was interrupted and can be resumed."""
        # If a callback stopped the fit before the first averaged epoch, the parameters are kept.
        state = trainer._state
        if history.stopped == "interrupted" or not self._count:
            return
        assert self._average is not None
        assert state.training_data is not None
        with trainer.lock:
            self._average.put()
            renew_statistics(state, state.training_data)
