"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from onnxtrain.errors import DivergenceError, InputError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.trainer._callbacks import Callback
from onnxtrain.trainer._data import Dataset
from onnxtrain.trainer._interrupt import InterruptGuard
from onnxtrain.trainer._metrics import Averages
from onnxtrain.trainer._position import Plan
from onnxtrain.trainer._report import Report
from onnxtrain.trainer._schedule import Schedule
from onnxtrain.trainer._snapshot import (
    Snapshot,
    StatisticsBackup,
    finite_gradients,
    finite_parameters,
    finite_statistics,
)

if TYPE_CHECKING:
    from onnxtrain.trainer._trainer import Trainer

__all__ = ["FitLoop"]

_REMEDY = (
    "Lower the learning rate, clip gradients (clip_grad_norm=1.0), or scale the inputs and targets to about "
    "-1 .. 1."
)

_Result = tuple[float, list[Array], list[Array]]
"""Loss and outputs of a batch, and its arrays."""

_SNAPSHOT_STEPS = 100
"""Steps between two snapshots: copying the state costs about as much as one step of a small model."""


class FitLoop:
    """Trains from the trainer's position to the end of an epoch, then saves what it says it saves.

    A step is `accumulate` batches followed by one update. Its loss and gradients are looked at before the
    update, so that a step that diverges changes nothing. Batches without a label that counts are left out.

    Args:
        trainer: what is trained; its position moves along.
        data: training data.
        validation: data to evaluate on after each epoch.
        plan: how an epoch is cut into steps.
        last_epoch: epoch to stop after.
        schedule: factor of the learning rate.
        callbacks: called between steps and epochs.
        report: shows the progress.
    """

    def __init__(
        self,
        trainer: Trainer,
        data: Dataset,
        validation: Dataset | None,
        plan: Plan,
        last_epoch: int,
        schedule: Schedule,
        callbacks: Sequence[Callback],
        report: Report,
    ) -> None:
        self._trainer = trainer
        self._run = trainer._run
        self._data = data
        self._validation = validation
        self._plan = plan
        self._last_epoch = last_epoch
        self._schedule = schedule
        self._callbacks = callbacks
        self._report = report
        self._statistics = StatisticsBackup(self._run.store)
        self._since_snapshot = 0
        if plan.accumulate > 1 and any(
            b.dtype.name == "bfloat16" for b in self._run.store.gradients.values()
        ):
            raise InputError(
                "accumulate > 1 is not supported for bfloat16 parameters; use a larger batch_size."
            )

    def run(self) -> None:
        """Trains until the last epoch, a callback's stop, or Ctrl-C.

        Raises:
            DivergenceError: The loss, the gradients or the parameters became NaN or infinite. The last good
                state has been restored and saved.
        """
        trainer, position = self._trainer, self._trainer._position
        with self._report, InterruptGuard() as guard:
            for callback in self._callbacks:
                callback.on_fit_begin(trainer)
            self._require_finite_start()
            self._snapshot = Snapshot.take(self._run.store, position)
            while position.epoch < self._last_epoch and position.history.stopped is None:
                if not self._epoch(guard):
                    position.history.stopped = "interrupted"
            position.unfinished = position.history.stopped == "interrupted"
            for callback in self._callbacks:
                callback.on_fit_end(trainer, position.history)
            if position.unfinished:
                where = trainer._save_and_keep()
                self._report.note(
                    f"Interrupted in epoch {position.epoch + 1} after {position.batch} of "
                    f"{self._data.batches} "
                    f"batches. The state is saved in '{where}': Trainer.resume('{where}') and the same fit "
                    "go on."
                )

    def _require_finite_start(self) -> None:
        if not finite_parameters(self._run.store):
            raise DivergenceError(
                "Training cannot start: parameters of the model are NaN or infinite already. Load a good "
                "model."
            )

    def _epoch(self, guard: InterruptGuard) -> bool:
        """Finishes the current epoch; returns False if it was interrupted."""
        trainer, position, plan = self._trainer, self._trainer._position, self._plan
        batches = self._data.batches
        order = self._data.order(position.seed, position.epoch, plan.shuffle)
        self._report.begin_epoch(position.epoch + 1, self._last_epoch, batches, position.batch)
        start, samples = time.perf_counter(), 0
        while position.batch < batches:
            if guard.requested:
                return False
            count = min(plan.accumulate, batches - position.batch)
            samples += self._step(range(position.batch, position.batch + count), order)
            rate = samples / (time.perf_counter() - start)
            self._report.step(count, position.averages.values(trainer.metrics), rate)
        rate = samples / max(time.perf_counter() - start, 1e-9)
        if guard.requested:
            return False
        self._finish_epoch(start, rate)
        return not (guard.requested and position.epoch < self._last_epoch)

    def _finish_epoch(self, start: float, rate: float) -> None:
        trainer, position = self._trainer, self._trainer._position
        record: dict[str, float] = {"epoch": position.epoch + 1, **position.averages.values(trainer.metrics)}
        if self._validation is not None:
            record |= trainer._evaluate(self._validation).values(trainer.metrics, "val_")
        record["learning_rate"] = self._run.optimizer.get_learning_rate()
        position.epoch, position.batch, position.averages = position.epoch + 1, 0, Averages()
        history = position.history
        history.epochs.append(record)
        history.seconds.append(time.perf_counter() - start)
        history.samples_per_second.append(rate)
        self._report.end_epoch(position.epoch, self._last_epoch, record, rate)
        position.unfinished = position.epoch < self._last_epoch  # before callbacks, which may save
        for callback in self._callbacks:
            callback.on_epoch_end(trainer, history)
        position.unfinished &= history.stopped is None
        if not trainer._workspace.temporary:
            trainer.save(trainer.directory)

    def _step(self, group: range, order: Array) -> int:
        """Runs one step on a group of batches and returns its number of samples."""
        trainer, position = self._trainer, self._trainer._position
        self._set_learning_rate(group.start)
        self._statistics.take()
        self._run.module.lazy_reset_grad()
        batches = [self._data.batch(index, order) for index in group]
        done, mean = self._accumulate(batches)
        if done:
            self._require_finite_results(done[-1][0])
            self._run.optimizer.step()
        for loss, outputs, arrays in done:
            trainer._add(position.averages, loss, outputs, arrays)
        for _ in range(len(batches) - len(done)):
            position.averages.add_skipped(trainer.metrics)
        position.batch = group.stop
        if done:
            self._take_snapshot()
            for callback in self._callbacks:
                callback.on_step_end(trainer, mean)
        return sum(len(arrays[0]) for arrays in batches)

    def _accumulate(self, batches: Sequence[list[Array]]) -> tuple[list[_Result], float]:
        """Leaves the gradient of the loss of all batches together in the store.

        Returns:
            The results of the batches that have a loss, and the loss of all together.
        """
        done: list[_Result] = []
        averages = Averages()
        last = total = 0.0  # what the gradients of the last batch, and of all so far, count in the mean
        for arrays in batches:
            count = self._trainer._loss_count(arrays)
            if count == 0:  # the mean over nothing
                continue
            if count is not None:
                if last not in (0, count):
                    self._scale_gradients(last / count)
                last, total = count, total + count
            loss, outputs = self._run.step(arrays, training=True)
            if not math.isfinite(loss):
                self._require_labels(arrays)
                self._diverge(f"the loss is {loss}")
            averages.add_batch([], loss, count, None, [], [])
            done.append((loss, outputs, arrays))
        if last != total:
            self._scale_gradients(last / total)
        return done, averages.values([]).get("loss", math.nan)

    def _require_labels(self, arrays: Sequence[Array]) -> None:
        """Tells a batch without a label that counts, which the loss of the model itself does not leave out."""
        for spec, array in zip(self._trainer.manifest.arguments, arrays, strict=True):
            ignored = spec.class_labels.ignore_index if spec.class_labels is not None else None
            if ignored is not None and (array == ignored).all():
                self._diverge(
                    f"all labels '{spec.name}' of a batch are {ignored}, so that there is nothing to average",
                    "Leave such samples out, use larger batches, or let onnxtrain append the loss, which then "
                    "leaves such batches out.",
                )

    def _require_finite_results(self, loss: float) -> None:
        """Looks at what the step has computed beside its loss."""
        for what, finite in (
            ("gradients", finite_gradients(self._run.store)),
            ("BatchNormalization statistics", finite_statistics(self._run.store)),
        ):
            if not finite:
                self._diverge(f"the loss is {loss:g}, but its {what} hold NaN or infinity")

    def _set_learning_rate(self, batch: int) -> None:
        position = self._trainer._position
        per_epoch = -(-self._data.batches // self._plan.accumulate)
        step = (position.epoch - position.fit_start) * per_epoch + batch // self._plan.accumulate
        total = (self._last_epoch - position.fit_start) * per_epoch
        self._run.optimizer.set_learning_rate(position.learning_rate * self._schedule(step, total))

    def _scale_gradients(self, factor: float) -> None:
        """Multiplies the accumulated gradients, to make their sum the gradient of a mean over all batches."""
        for gradient in self._run.store.gradients.values():
            value = gradient.read()
            value = np.multiply(
                value, value.dtype.type(factor), out=value if gradient.device.type == "cpu" else None
            )
            if gradient.device.type != "cpu":
                gradient.write(value)

    def _take_snapshot(self) -> None:
        self._since_snapshot += 1
        if self._since_snapshot < _SNAPSHOT_STEPS:
            return
        self._since_snapshot = 0
        if not finite_parameters(self._run.store):
            self._diverge("the parameters hold NaN or infinity")
        self._snapshot = Snapshot.take(self._run.store, self._trainer._position)

    def _diverge(self, what: str, remedy: str = _REMEDY) -> None:
        """Goes back to the last good state, saves it and raises."""
        trainer, position, store = self._trainer, self._trainer._position, self._run.store
        epoch, step = position.epoch + 1, position.batch // self._plan.accumulate + 1
        rate = self._run.optimizer.get_learning_rate()
        self._statistics.restore()
        store.gradients_valid = False
        if not finite_parameters(store):
            trainer._position = position = self._snapshot.restore(store)
        kept = f"epoch {position.epoch + 1}, before step {position.batch // self._plan.accumulate + 1}"
        position.unfinished = True
        where = trainer._save_and_keep()
        raise DivergenceError(
            f"Training stopped in epoch {epoch}, step {step}: {what} (learning rate {rate:g}). The "
            f"parameters are those of {kept}, saved in '{where}'. {remedy}"
        )
