"""The training loop."""

from __future__ import annotations

import contextlib
import hashlib
import math
import struct
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NoReturn

import numpy as np
import onnxruntime as ort

from onnxtrain._words import argument, words
from onnxtrain.errors import DivergenceError, InputError
from onnxtrain.runtime.dtypes import Array, narrow, widen
from onnxtrain.runtime.lock import ProcessLock
from onnxtrain.trainer._callbacks import Events, StepGradients
from onnxtrain.trainer._interrupt import InterruptGuard
from onnxtrain.trainer._metrics import Averages
from onnxtrain.trainer._position import Plan
from onnxtrain.trainer._report import Report
from onnxtrain.trainer._run import Step
from onnxtrain.trainer._snapshot import (
    FiniteCheck,
    StatisticsBackup,
    finite_parameters,
)
from onnxtrain.trainer._state import TrainingState
from onnxtrain.trainer.data import Pass, Source

_SNAPSHOT_STEPS = 100
"""Steps between two snapshots: copying the state costs about as much as one step of a small model."""


_generator = ProcessLock()
"""Held from seeding ONNX Runtime's generator to the end of the run that draws from it: fits of other trainers, in other
threads, share the generator."""

_SHOW_SECONDS = 0.05
"""Between two updates of a progress bar, each of which costs as much as a step of a small model."""


class FitLoop:
    """Trains from the state's position to the end of an epoch, then saves what it says it saves.

    A step is `accumulate` batches followed by one update. Its loss and gradients are looked at before the
    update, so that a step that diverges changes nothing. Batches without a label that counts are left out.

    Args:
        state: what is trained; its position moves along.
        data: training data.
        validation: data to evaluate on after each epoch.
        plan: how an epoch is cut into steps, and how many epochs there are.
        events: the callbacks.
        report: shows the progress.
    """

    def __init__(
        self,
        state: TrainingState,
        data: Source,
        validation: Source | None,
        plan: Plan,
        events: Events,
        report: Report,
    ) -> None:
        self._state = state
        self._run = state.run
        self._data = data
        self._validation = validation
        self._plan = plan
        position = state.position
        self._resumed = position.unfinished
        self._last_epoch = (position.fit_start if position.unfinished else position.epoch) + plan.epochs
        self._events = events
        self._report = report
        self._statistics = StatisticsBackup(self._run.store)
        gradients, statistics = self._run.store.all_gradients(), self._run.store.statistics.values()
        self._finite = FiniteCheck([*gradients, *statistics])
        self._finite_gradients = FiniteCheck(gradients)
        self._drawing = _generator if self._run.draws else contextlib.nullcontext()
        self._since_snapshot = 0
        self._stepped = False
        self._unshown = 0  # batches
        if plan.accumulate > 1 and any(
            b.dtype.name == "bfloat16" for b in self._run.store.gradients.values()
        ):
            raise InputError(
                f"{argument('accumulate')} > 1 is not supported for bfloat16 parameters; use a larger "
                f"{argument('batch_size')}."
            )

    def run(self) -> None:
        """Trains until the last epoch, a callback's stop, or Ctrl-C.

        Raises:
            DivergenceError: The loss, the gradients or the parameters became NaN or infinite. The last good
                state has been restored and saved.
        """
        state, position = self._state, self._state.position
        with self._report, InterruptGuard() as guard:
            before = self._begin()
            self._snapshot = state.snapshot()
            try:
                while position.epoch < self._last_epoch and position.history.stopped is None:
                    if not self._epoch(guard) and position.history.stopped is None:
                        position.history.stopped = "interrupted"
            except DivergenceError:
                raise
            except Exception:
                if not self._stepped:  # the data is bad from the first batch on
                    position.undo(before)
                raise
            position.unfinished = position.history.stopped == "interrupted"
            self._events.fit_end(position.history)
            if position.unfinished:
                where = state.save_and_keep()
                of = "" if self._data.batches is None else f" of {self._data.batches}"
                self._report.note(
                    f"Interrupted in epoch {position.epoch + 1} after {position.batch}{of} batches. The state is saved "
                    f"in '{where}': {state.resume_hint.format(where)}"
                )
            elif not state.workspace.temporary:
                state.save(state.directory)  # callbacks may have put back the best parameters

    def _begin(self) -> dict[str, Any]:
        """Takes up the plan; where a callback or the model does not fit, the position is what it was.

        Returns:
            What takes the plan back.
        """
        position = self._state.position
        before = position.begin(self._plan)
        try:
            self._data.begin(position.stream, resumed=self._resumed, epochs=self._plan.epochs)
            if self._validation is not None:
                self._validation.begin(None, resumed=False, epochs=self._plan.epochs)
            self._events.fit_begin()
            self._require_finite_start()
        except Exception:
            position.undo(before)
            raise
        return before

    def _require_finite_start(self) -> None:
        if not finite_parameters(self._run.store):
            raise DivergenceError(
                "Training cannot start: parameters of the model are NaN or infinite already. Load a good "
                "model."
            )

    def _epoch(self, guard: InterruptGuard) -> bool:
        """Finishes the current epoch; returns False if it was interrupted."""
        position, plan = self._state.position, self._plan
        epoch = Pass(position.seed, position.epoch, position.fit_start, plan.shuffle, True)
        batches = self._data.read(epoch, position.batch)
        self._report.begin_epoch(position.epoch + 1, self._last_epoch, self._data.batches, position.batch)
        start, samples = time.perf_counter(), 0
        shown = start
        while not guard.requested:
            group = list(islice(batches, plan.accumulate))
            if not group:
                break
            samples += self._step(group)
            rate = samples / (time.perf_counter() - start)
            shown = self._show(group, shown, rate)
        self._show((), -math.inf, samples / max(time.perf_counter() - start, 1e-9))
        rate = samples / max(time.perf_counter() - start, 1e-9)
        if guard.requested:
            return False
        self._finish_epoch(start, rate)
        return not (guard.requested and position.epoch < self._last_epoch)

    def _show(self, group: Sequence[object], shown: float, rate: float) -> float:
        """Reports the progress where it was last shown long enough ago for eyes; returns when that was."""
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
            record |= state.evaluate(self._validation, "val_")
        record["learning_rate"] = self._run.optimizer.get_learning_rate()
        history = position.history
        with state.lock:  # another thread may save
            position.epoch, position.batch, position.averages = position.epoch + 1, 0, Averages()
            position.stream = self._data.mark()
            history.epochs.append(record)
            history.seconds.append(time.perf_counter() - start)
            history.samples_per_second.append(rate)
            position.unfinished = position.epoch < self._last_epoch  # before callbacks, which may save
        self._report.end_epoch(position.epoch, self._last_epoch, record, rate)
        self._events.epoch_end(history)
        # Until callbacks have had their say at the end of the fit, a process that is killed has not finished it.
        position.unfinished = True
        ended = position.epoch == self._last_epoch or history.stopped is not None
        if not ended and not state.workspace.temporary:  # else it is saved when callbacks have ended, too
            state.save(state.directory)

    def _step(self, batches: Sequence[list[Array]]) -> int:
        """Runs one step on a group of batches and returns its number of samples."""
        # Callbacks are called without the lock: they may wait for a thread that needs it.
        with self._state.lock:
            try:
                mean = self._update(batches)
            except _Diverged as reason:
                self._restore_and_raise(str(reason), reason.remedy)
        if mean is not None:
            self._events.step_end(mean)
        return sum(len(arrays[0]) for arrays in batches)

    def _update(self, batches: Sequence[list[Array]]) -> float | None:
        """Runs one step on a group of batches; returns the loss of all together, None where none has a label."""
        state, position = self._state, self._state.position
        position.stream = self._data.mark()
        self._set_learning_rate()
        self._statistics.take()
        self._run.module.lazy_reset_grad()
        done, mean = self._accumulate(batches)
        if done:
            self._require_finite_results([step for step, _ in done])
            if self._events.wants_gradients:
                self._events.gradients(_StepGradients(self, batches))
            self._run.optimizer.step()
            state.update_average()
        for step, count in done:
            state.add(position.averages, step, count)
        for _ in range(len(batches) - len(done)):
            position.averages.add_skipped(state.metrics)
        position.batch, position.step = position.batch + len(batches), position.step + 1
        self._stepped = True
        if not done:
            return None
        self._take_snapshot()
        return mean

    def _accumulate(self, batches: Sequence[list[Array]]) -> tuple[list[tuple[Step, float | None]], float]:
        """Leaves the gradient of the loss of all batches together in the store.

        Returns:
            The results of the batches that have a loss, with what each counts, and the loss of all together.
        """
        done: list[tuple[Step, float | None]] = []
        losses = 0.0
        last = total = 0.0  # what the gradients of the last batch, and of all so far, count in the mean
        for index, arrays in enumerate(batches):
            count = self._state.loss_count(arrays)
            if count == 0:  # the mean over nothing
                continue
            if count is not None:
                if last not in (0, count):
                    self._scale_gradients(last / count)
                last, total = count, total + count
            with self._drawing:
                self._seed(index)
                loss, outputs = self._run.step(arrays, training=True)
            if not math.isfinite(loss):
                self._require_labels(arrays)
                raise _Diverged(f"the loss is {loss}")
            losses += loss if count is None else loss * count
            done.append((Step(arrays, loss, outputs), count))
        if last != total:
            self._scale_gradients(last / total)
        return done, losses / total if total else losses if done else math.nan

    def _seed(self, index: int) -> None:
        """Makes the random numbers of the next batch, those of Dropout, depend on seed and position alone."""
        position = self._state.position
        numbers = struct.pack("<4q", position.seed, position.epoch, position.batch, index)
        # onnxruntime's generators have 31 bits of state.
        ort.set_seed(int.from_bytes(hashlib.blake2b(numbers, digest_size=4).digest(), "little") >> 1)

    def _require_labels(self, arrays: Sequence[Array]) -> None:
        """Tells a batch without a label that counts, which the loss of the model itself does not leave out."""
        for spec, array in zip(self._run.manifest.arguments, arrays, strict=True):
            ignored = spec.class_labels.ignore_index if spec.class_labels is not None else None
            if ignored is not None and (array == ignored).all():
                raise _Diverged(
                    f"all labels '{spec.name}' of a batch are {ignored}, so that there is nothing to average",
                    "Leave such samples out, use larger batches, or let onnxtrain append the loss, which then "
                    "leaves such batches out.",
                )

    def _require_finite_results(self, steps: Sequence[Step]) -> None:
        """Looks at what the step has computed beside its loss."""
        if self._finite():
            return
        loss = steps[-1].loss
        if not self._finite_gradients():
            raise _Diverged(f"the loss is {loss:g}, but its gradients hold NaN or infinity")
        if any(len(step.arrays[0]) == 1 for step in steps):
            raise _Diverged(
                "a batch has one sample, and BatchNormalization cannot take a variance of one value per channel "
                "(PyTorch refuses such batches, too)",
                f"Begin anew with another {argument('batch_size')}, so that no sample is left alone"
                f"{words().drop_last()}.",
            )
        raise _Diverged(f"the loss is {loss:g}, but its BatchNormalization statistics hold NaN or infinity")

    def _set_learning_rate(self) -> None:
        state, position, batches = self._state, self._state.position, self._data.batches
        per_epoch = None if batches is None else -(-batches // self._plan.accumulate)
        progress = position.progress(self._plan, per_epoch, state.settings.total_steps)
        self._run.optimizer.set_learning_rate(position.learning_rate * state.schedule(*progress))

    def _scale_gradients(self, factor: float) -> None:
        """Multiplies the accumulated gradients, to make their sum the gradient of a mean over all batches."""
        for gradient in self._run.store.gradients.values():
            value = gradient.read()
            value = np.multiply(
                value, value.dtype.type(factor), out=value if gradient.device.type == "cpu" else None
            )
            if gradient.device.type != "cpu":
                gradient.write(value)
        for rows in self._run.store.row_gradients.values():
            rows.scale(factor)

    def _take_snapshot(self) -> None:
        self._since_snapshot += 1
        if self._since_snapshot < _SNAPSHOT_STEPS:
            return
        self._since_snapshot = 0
        if not finite_parameters(self._run.store):
            raise _Diverged("the parameters hold NaN or infinity")
        self._snapshot = self._state.snapshot()

    def recompute_gradients(self, batches: Sequence[list[Array]], parameters: Mapping[str, Array]) -> None:
        """Replaces the gradients of a step by those of the same batches at other parameters.

        Parameters and BatchNorm statistics are afterwards what they were before, also if the loss there is NaN.
        """
        store = self._run.store
        kept = {name: store.parameters[name].read().copy() for name in parameters}
        statistics = StatisticsBackup(store)
        statistics.take()
        self._run.module.lazy_reset_grad()
        try:
            for name, value in parameters.items():
                store.parameters[name].write(narrow(value, store.parameters[name].dtype))
            done, _ = self._accumulate(batches)
            self._require_finite_results([step for step, _ in done])
        finally:
            for name, value in kept.items():
                store.parameters[name].write(value)
            # One step updates running statistics once, from the activations of the parameters that are trained.
            statistics.restore()

    def _restore_and_raise(self, what: str, remedy: str | None) -> NoReturn:
        """Goes back to the last good state, saves it and raises DivergenceError."""
        state, position, store = self._state, self._state.position, self._run.store
        epoch, step = position.epoch + 1, position.batch // self._plan.accumulate + 1
        rate = self._run.optimizer.get_learning_rate()
        self._statistics.restore()
        store.gradients_valid = False
        if not finite_parameters(store):
            state.position = position = self._snapshot.restore(store)
        kept = f"epoch {position.epoch + 1}, before step {position.batch // self._plan.accumulate + 1}"
        position.unfinished = True
        where = state.save_and_keep()
        raise DivergenceError(
            f"Training stopped in epoch {epoch}, step {step}: {what} (learning rate {rate:g}). The "
            f"parameters are those of {kept}, saved in '{where}'. {remedy or _remedy()}"
        ) from None


class _Diverged(Exception):
    """Stops a step whose numbers are not finite; parameters are put back while it passes.

    Args:
        reason: what is not finite, for the message.
        remedy: what to do about it; None for the usual advice.
    """

    def __init__(self, reason: str, remedy: str | None = None) -> None:
        super().__init__(reason)
        self.remedy = remedy


class _StepGradients(StepGradients):
    """Gradients of a step of a fit that is under way.

    Args:
        loop: the fit.
        batches: arrays of the step's batches.
    """

    def __init__(self, loop: FitLoop, batches: Sequence[list[Array]]) -> None:
        self._loop = loop
        self._batches = batches

    def values(self) -> dict[str, Array]:
        store = self._loop._run.store
        if store.row_gradients:
            raise InputError(
                f"A callback reads the gradients of a step, and those of {', '.join(store.row_gradients)} are sparse. "
                "Leave sparse_gradients out."
            )
        # Copies: recompute_at writes its gradients to the same memory.
        return {
            name: np.array(widen(gradient.read(), gradient.dtype))
            for name, gradient in store.gradients.items()
        }

    def recompute_at(self, parameters: Mapping[str, Array]) -> None:
        self._loop.recompute_gradients(self._batches, parameters)


def _remedy() -> str:
    clipping = argument("clip_grad_norm", 1.0)
    return f"Lower the learning rate, clip gradients ({clipping}), or scale the inputs and targets to about -1 .. 1."
