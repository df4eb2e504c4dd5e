"""Runs the epochs of a fit, and handles Ctrl-C, divergence and bad data."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from onnxtrain.errors import DivergenceError, InputError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.trainer._fit.interrupt import InterruptGuard
from onnxtrain.trainer._fit.snapshot import finite_parameters
from onnxtrain.trainer._fit.step import Fit, Stepper
from onnxtrain.trainer._metrics.metrics import Averages
from onnxtrain.trainer.data import Pass

# Seconds between two updates of the progress bar: one update costs as much as a step of a small model.
_SHOW_SECONDS = 0.05


class FitLoop:
    """Trains from the state's position to the last epoch of the plan, and saves the state after each epoch.

    Args:
        fit: data, plan and state of the fit.
        stepper: object that takes the optimizer steps.
    """

    def __init__(self, fit: Fit, stepper: Stepper) -> None:
        self._state = fit.state
        self._data = fit.data
        self._validation = fit.validation
        self._plan = fit.plan
        position = fit.state.position
        self._resumed = position.unfinished
        self._last_epoch = (position.fit_start if position.unfinished else position.epoch) + fit.plan.epochs
        self._events = fit.events
        self._report = fit.report
        self._stepper = stepper
        # Batches since the progress bar was last updated.
        self._unshown = 0

    def run(self) -> None:
        """Trains until the last epoch, until a callback stops the fit, or until Ctrl-C.

        Raises:
            DivergenceError: the loss, the gradients or the parameters became NaN or infinite. The last good state was
                restored and saved.
        """
        state, position = self._state, self._state.position
        with self._report, self._stepper.guard() as guard:
            before = self._begin()
            self._stepper.begin()
            try:
                while position.epoch < self._last_epoch and position.history.stopped is None:
                    if not self._epoch(guard) and position.history.stopped is None:
                        position.history.stopped = "interrupted"
            except DivergenceError:
                raise
            except Exception:
                # The first batch was bad: no step was taken, so the next call may have other arguments.
                if not self._stepper.stepped:
                    position.undo(before)
                raise
            if not (self._stepper.updated or self._resumed or position.history.stopped == "interrupted"):
                self._refuse_without_update(before)
            # Set before the callbacks, which may save the run.
            position.unfinished = position.history.stopped == "interrupted"
            self._events.call("on_fit_end", position.history)
            if position.unfinished:
                where = state.save_and_keep()
                of = "" if self._data.batches is None else f" of {self._data.batches}"
                self._report.note(
                    f"Interrupted in epoch {position.epoch + 1} after {position.batch}{of} batches. The state is saved "
                    f"in '{where}': {state.resume_hint.format(where)}"
                )
            elif not state.workspace.temporary:
                # Saved after the callbacks, because EarlyStopping may have restored the best parameters.
                state.save(state.directory)

    def _refuse_without_update(self, before: dict[str, Any]) -> None:
        """Restores the state from before the fit, and raises InputError because no parameter was updated."""
        state = self._state
        self._stepper.restore()
        state.position.undo(before)
        # Each epoch was saved as if it had been trained.
        if not state.workspace.temporary:
            state.save(state.directory)
        raise InputError(
            "No parameter was updated, because no label contributes to the loss: each label is ignored "
            "(ignore_index), is the first token of a sequence, which is never predicted, or has a sample "
            "or class weight of 0."
        )

    def _begin(self) -> dict[str, Any]:
        """Starts the fit; returns the state that :meth:`Position.undo` restores."""
        position = self._state.position
        before = position.begin(self._plan)
        try:
            self._data.begin(position.stream, resumed=self._resumed, epochs=self._plan.epochs)
            if self._validation is not None:
                self._validation.begin(None, resumed=False, epochs=self._plan.epochs)
            self._events.call("on_fit_begin")
            if not finite_parameters(self._state.run.store):
                raise DivergenceError(
                    "Training cannot start: parameters of the model are NaN or infinite. Load a model "
                    "with finite parameters."
                )
        except Exception:
            position.undo(before)
            raise
        return before

    def _epoch(self, guard: InterruptGuard) -> bool:
        """Runs the rest of the current epoch; returns False if Ctrl-C interrupted it."""
        position, plan = self._state.position, self._plan
        worker = self._state.workers.worker
        epoch = Pass(position.seed, position.epoch, position.fit_start, plan.shuffle, True, worker)
        batches = self._data.read(epoch, position.batch)
        self._report.begin_epoch(position.epoch + 1, self._last_epoch, self._data.batches, position.batch)
        start, samples = time.perf_counter(), 0
        shown = start
        while not guard.requested:
            # The last group of an epoch may be smaller, but never extends into the next epoch: metrics and validation
            # of an epoch belong to whole steps.
            group = list(self._copied_if_volatile(islice(batches, plan.accumulate)))
            if not group:
                break
            samples += self._stepper.step(group)
            rate = _rate(samples, time.perf_counter() - start)
            shown = self._show(group, shown, rate)
        # Sources raise more specific errors. This one keeps an epoch without steps from counting as trained.
        if not position.batch and not guard.requested:
            raise InputError(f"The data has no batch for epoch {position.epoch + 1}.")
        # Otherwise only the next step would notice an update that overflowed; here the epoch is evaluated and saved
        # first.
        self._stepper.check()
        # Complete the bar before the epoch's line replaces it.
        rate = _rate(samples, time.perf_counter() - start)
        self._show((), -math.inf, rate)
        if guard.requested:
            return False
        self._finish_epoch(start, rate)
        # Ctrl-C during the validation of the last epoch does not interrupt: the fit is complete.
        return not (guard.requested and position.epoch < self._last_epoch)

    def _copied_if_volatile(self, batches: Iterable[list[Array]]) -> Iterator[list[Array]]:
        """Yields the batches of a step; copies a batch if reading the next one would overwrite it."""
        last = self._plan.accumulate - 1
        for index, arrays in enumerate(batches):
            yield [array.copy() for array in arrays] if self._data.volatile and index < last else arrays

    def _show(self, group: Sequence[object], shown: float, rate: float) -> float:
        """Updates the progress bar, at most once every `_SHOW_SECONDS`.

        Args:
            group: batches trained on since the last call.
            shown: time of the last update of the progress bar, from `time.perf_counter`; -inf to update it in any case.
            rate: training throughput in samples per second.

        Returns:
            The time of the last update: now, or `shown` if the bar was not updated.
        """
        if not self._report.shows_steps:
            return shown
        self._unshown += len(group)
        now = time.perf_counter()
        if now - shown < _SHOW_SECONDS:
            return shown
        position = self._state.position
        self._report.step(self._unshown, position.averages.running(self._state.metrics), rate)
        self._unshown = 0
        return now

    def _finish_epoch(self, start: float, rate: float) -> None:
        state, position = self._state, self._state.position
        record: dict[str, float] = {"epoch": position.epoch + 1, **position.averages.values(state.metrics)}
        if self._validation is not None:
            # Validated before the epoch counts as finished: if validation raises, the resumed fit repeats it.
            record |= state.evaluate(self._validation, "val_")
        record["learning_rate"] = state.run.optimizer.get_learning_rate()
        history = position.history
        # Under the lock, because another thread may call Trainer.save, which must not combine the new epoch with the
        # old history.
        with state.lock:
            position.epoch, position.batch, position.averages = position.epoch + 1, 0, Averages()
            position.stream = self._data.mark()
            history.epochs.append(record)
            history.seconds.append(time.perf_counter() - start)
            history.samples_per_second.append(rate)
            # Set before the callbacks: the last save of ModelCheckpoint is that of a finished fit.
            position.unfinished = position.epoch < self._last_epoch
        self._report.end_epoch(position.epoch, self._last_epoch, record, rate)
        self._events.call("on_epoch_end", history)
        # If the process is killed before on_fit_end, the resumed fit calls on_fit_end again, which restores the best
        # parameters.
        position.unfinished = True
        ended = position.epoch == self._last_epoch or history.stopped is not None
        # After the last epoch, `run` saves once the callbacks are done.
        if not ended and not state.workspace.temporary:
            state.save(state.directory)


def _rate(samples: int, seconds: float) -> float:
    """Returns the number of samples per second; 0 if no time has passed."""
    # Libraries such as freezegun stop the clock.
    return samples / seconds if seconds > 0 else 0.0
