"""Takes the optimizer steps of a fit: computes gradients, checks them for NaN, updates the parameters."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from onnxtrain._words import argument, words
from onnxtrain.errors import DivergenceError, InputError
from onnxtrain.runtime.dtypes import Array, narrow, widen
from onnxtrain.selection import some_names
from onnxtrain.trainer._fit.events import Events, StepGradients
from onnxtrain.trainer._fit.freezing import Freezing
from onnxtrain.trainer._fit.interrupt import InterruptGuard
from onnxtrain.trainer._fit.snapshot import FiniteCheck, StatisticsBackup, finite_parameters, not_finite
from onnxtrain.trainer._fit.state import TrainingState
from onnxtrain.trainer._run.position import Plan
from onnxtrain.trainer._run.run import Step
from onnxtrain.trainer._show.report import Report
from onnxtrain.trainer.data import Source

# Steps between two snapshots: a snapshot costs about as much as one step of a small model.
_SNAPSHOT_STEPS = 100


@dataclass(frozen=True)
class Fit:
    """A call to `Trainer.fit` with checked arguments.

    Attributes:
        state: models, tensors and position; training updates them.
        data: batches to train on.
        validation: batches to evaluate on; None for no validation.
        plan: arguments of the call.
        events: receiver of the fit's events.
        report: display of the progress.
        frozen_until: see :class:`Freezing`.
    """

    state: TrainingState
    data: Source
    validation: Source | None
    plan: Plan
    events: Events
    report: Report
    frozen_until: Mapping[str, int] = field(default_factory=dict)


def seed_run(state: TrainingState, index: int) -> None:
    """Seeds the next run of the training model, so that a resumed fit draws the same random numbers.

    Args:
        state: the trainer's state.
        index: index of the batch within the step.
    """
    run, rank = state.run, state.workers.worker.rank
    # The index counts the runs: gradients that are recomputed get the same Dropout masks.
    run.module.seed, run.store.runs = _seed(state.position.seed, rank), index


def _seed(seed: int, rank: int) -> int:
    """Returns a worker's seed: the trainer's seed for rank 0, a 63-bit hash of seed and rank for other workers."""
    if not rank:
        return seed
    digest = hashlib.blake2b(struct.pack("<2q", seed, rank), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Stepper:
    """Takes optimizer steps: computes the gradients of one or more batches, then updates the parameters once.

    Loss and gradients are checked before the update, so that a step that diverges changes nothing. Batches whose labels
    are all ignored are skipped.

    Args:
        fit: data, plan and state of the fit.

    Attributes:
        stepped: True after the first step, even if it skipped all of its batches.
        updated: True after the first update of the parameters.
        one_batch: phrase for the samples on which the model runs at once, for error messages: "a batch", or "its share
            of a batch" for one of several workers.
    """

    one_batch = "a batch"

    def __init__(self, fit: Fit) -> None:
        self._state = fit.state
        self._run = fit.state.run
        self._data = fit.data
        self._validation = fit.validation
        self._plan = fit.plan
        self._events = fit.events
        self._report = fit.report
        store = self._run.store
        # A run of the training model also updates the BatchNorm statistics; a step that is refused restores them.
        self._statistics = StatisticsBackup(store)
        self._freezing = Freezing(fit.state, fit.frozen_until)
        gradients = store.all_gradients()
        self._finite = FiniteCheck([*gradients, *store.statistics.values()])
        self._finite_gradients = FiniteCheck(gradients)
        self._since_snapshot = 0
        # True after an update until the new parameters have been checked for NaN.
        self._unchecked = False
        self.stepped = self.updated = False
        # The training model accumulates gradients in the dtype of the parameter. In bfloat16, with 8 bits of precision,
        # later batches would be rounded away.
        if fit.plan.accumulate > 1 and any(b.dtype.name == "bfloat16" for b in store.gradients.values()):
            raise InputError(
                f"{argument('accumulate')} > 1 is not supported for bfloat16 parameters; use a larger "
                f"{argument('batch_size')}."
            )

    def guard(self) -> InterruptGuard:
        """Returns a Ctrl-C handler."""
        return InterruptGuard()

    def begin(self) -> None:
        """Takes the first snapshot, which is restored if the fit diverges."""
        self._snapshot = self._state.snapshot()

    def restore(self) -> None:
        """Restores the last snapshot; before the first update, this is the state at the beginning of the fit."""
        self._state.position = self._snapshot.restore(self._run.store)

    def step(self, batches: Sequence[list[Array]]) -> int:
        """Takes one step on a group of batches, then calls the callbacks; returns the number of samples."""
        # Callbacks run without the lock, because they may wait for a thread that needs it.
        with self._state.lock:
            try:
                mean = self._update(batches)
                if self._is_used(self._state.position.step):
                    self._require_finite_update()
            except Diverged as reason:
                self._restore_and_raise(reason)
        # Before on_step_end, in which ModelCheckpoint saves, so that the save includes the evaluation.
        if self._validation is not None and self._evaluates(self._state.position.step):
            self._evaluate(self._validation)
        if mean is not None:
            self._events.call("on_step_end", mean)
        # A worker without a share of a batch gets an empty list.
        return sum(len(arrays[0]) for arrays in batches if arrays)

    def check(self) -> None:
        """Checks that parameters and optimizer state are finite after the last update of an epoch.

        Raises:
            DivergenceError: the update made parameters or optimizer state NaN or infinite. The last good state was
                restored and saved.
        """
        with self._state.lock:
            try:
                self._require_finite_update()
            except Diverged as reason:
                self._restore_and_raise(reason)

    def _evaluates(self, step: int) -> bool:
        """True if `evaluate_every` requires an evaluation after optimizer step `step`."""
        every = self._plan.evaluate_every
        return every is not None and step % every == 0

    def _is_used(self, step: int) -> bool:
        """True if the parameters after this step are evaluated or saved before the next step."""
        return self._evaluates(step) or self._events.saves(step)

    def _evaluate(self, validation: Source) -> None:
        """Evaluates in the middle of an epoch, and records the result."""
        state, position = self._state, self._state.position
        values = state.evaluate(validation, "val_")
        entry: dict[str, float] = {"step": position.step, "epoch": position.epoch + 1, **values}
        # Another thread may be saving.
        with state.lock:
            position.history.evaluations.append(entry)
        self._report.evaluation(entry)
        self._events.call("on_evaluation", entry)

    def _update(self, batches: Sequence[list[Array]]) -> float | None:
        """Updates the parameters once; returns the mean loss of the batches, or None if all labels are ignored."""
        state, position = self._state, self._state.position
        # A resumed fit reads the current pass over the data again, with the random generators restored from this mark.
        position.stream = self._data.mark()
        self._set_learning_rate()
        if unfrozen := self._freezing.begin_epoch():
            names = some_names(unfrozen, 4)
            self._report.note(f"Epoch {position.epoch + 1} unfreezes {len(unfrozen)} parameters: {names}.")
        self._statistics.take()
        # Otherwise the training model would add to the gradients of the last step.
        self._run.module.lazy_reset_grad()
        done, mean = self._accumulate(batches)
        self._freezing.restore_statistics(self._statistics)
        self._freezing.clear_gradients()
        # NaN means that all labels are ignored. With several workers, one worker may have none where others have some.
        taken = not math.isnan(mean)
        if taken:
            self._require_finite_results([step for step, _ in done])
            if self._events.handles("on_gradients"):
                self._events.call("on_gradients", _StepGradients(self, batches))
            self._freezing.step()
            self._unchecked = self.updated = True
            state.update_average()
        self._record(done, batches)
        # A skipped group is still a step of the schedule: the length of an epoch must not depend on the labels.
        position.batch, position.step = position.batch + len(batches), position.step + 1
        self.stepped = True
        if not taken:
            return None
        self._take_snapshot()
        return mean

    def _record(self, done: Sequence[tuple[Step, float | None]], batches: Sequence[list[Array]]) -> None:
        """Adds the loss and the metrics of a step to the averages of the epoch.

        Args:
            done: results of the batches that were not skipped, with their weights in the mean loss.
            batches: all batches of the step.
        """
        state = self._state
        for step, count in done:
            state.add(state.position.averages, step, count)
        # Skipped batches add each key with count 0, so that an epoch without any label records NaN, not nothing.
        for _ in range(len(batches) - len(done)):
            state.position.averages.add_skipped(state.metrics)

    def _accumulate(self, batches: Sequence[list[Array]]) -> tuple[list[tuple[Step, float | None]], float]:
        """Computes the gradients of the mean loss over all batches, and accumulates them in the run's store.

        Returns:
            The results of the batches that were not skipped, each with its weight in the mean; and the mean loss,
            which is NaN if all batches were skipped.
        """
        done: list[tuple[Step, float | None]] = []
        losses = 0.0
        # Counts of the last batch and of all batches so far; the gradients in the store are sums weighted by `last`.
        last = total = 0.0
        for index, arrays in enumerate(batches):
            count = self._state.loss_count(arrays)
            # A mean over no labels would be NaN, in ONNX as in PyTorch. Without the batch, the mean is over the others.
            if count == 0:
                continue
            if count is not None:
                # The training model adds the mean gradient of each batch with weight 1. Rescaling the sum before each
                # batch, and once at the end, gives the gradient of the mean over all samples, even if batches differ in
                # size.
                if last not in (0, count):
                    self._scale_gradients(last / count)
                last, total = count, total + count
            seed_run(self._state, index)
            loss, outputs = self._run.step(arrays, training=True)
            if not math.isfinite(loss):
                self._require_labels(arrays)
                raise Diverged(f"the loss is {loss}")
            losses += loss if count is None else loss * count
            done.append((Step(arrays, loss, outputs), count))
        if last != total:
            self._scale_gradients(last / total)
        return done, losses / total if total else losses if done else math.nan

    def _require_labels(self, arrays: Sequence[Array]) -> None:
        """Raises Diverged if all labels of a batch are ignored, which explains why its loss is not finite.

        This may occur if the loss is inside the model. Otherwise, batches whose labels are all ignored are skipped.
        """
        for spec, array in zip(self._run.manifest.arguments, arrays, strict=True):
            ignored = spec.class_labels.ignore_index if spec.class_labels is not None else None
            # Such batches are skipped if onnxtrain knows the labels of the loss. A loss inside the model may add a mean
            # over labels to something else, which is NaN if all labels are ignored.
            if ignored is not None and (array == ignored).all():
                raise Diverged(
                    f"all labels '{spec.name}' of {self.one_batch} are {ignored}, so there is nothing to "
                    "average",
                    "Remove such samples, use larger batches, or let onnxtrain append the loss to the "
                    f"scores ({argument('loss', 'cross_entropy')}), which skips such batches.",
                )

    def _require_finite_results(self, steps: Sequence[Step]) -> None:
        """Raises Diverged if gradients or BatchNorm statistics are not finite."""
        if self._finite():
            return
        # With several workers, this one may have no sample in the step.
        loss = steps[-1].loss if steps else math.nan
        if not self._finite_gradients():
            raise Diverged(f"the loss is {loss:g}, but its gradients contain NaN or infinity")
        # The unbiased variance of one value is 0 / 0; PyTorch raises "Expected more than 1 value per channel".
        if any(len(step.arrays[0]) == 1 for step in steps):
            raise Diverged(
                "a batch has one sample, and BatchNormalization cannot compute a variance from one value "
                "per channel (PyTorch rejects such batches, too)",
                f"Start a new run with another {argument('batch_size')}, so that no batch has one sample"
                f"{words().drop_last()}.",
            )
        raise Diverged(f"the loss is {loss:g}, but its BatchNormalization statistics contain NaN or infinity")

    def _set_learning_rate(self) -> None:
        state, position, batches = self._state, self._state.position, self._data.batches
        per_epoch = None if batches is None else -(-batches // self._plan.accumulate)
        progress = position.progress(self._plan, per_epoch, state.settings.total_steps)
        self._run.optimizer.set_learning_rate(position.learning_rate * state.schedule(*progress))

    def _scale_gradients(self, factor: float) -> None:
        """Multiplies the accumulated gradients by a factor."""
        for gradient in self._run.store.gradients.values():
            value = gradient.read()
            # On the CPU, `read` returns the gradient's own memory, which is scaled in place; on other devices, a copy.
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
        self._require_finite_update()
        # Frees the old snapshot first: two would need the memory of parameters and optimizer state once more.
        del self._snapshot
        self._snapshot = self._state.snapshot()

    def _require_finite_update(self) -> None:
        """Raises Diverged if the last update made parameters or optimizer state NaN or infinite."""
        # Not called after every step: nearly always, the next step's loss or gradients reveal it at no cost.
        if not self._unchecked:
            return
        self._unchecked = False
        if (what := self._not_finite()) is not None:
            raise Diverged(f"the update made the {what} NaN or infinite", of_update=True)

    def _not_finite(self) -> str | None:
        """Returns which tensors are not finite, e.g. "parameters", for error messages; None if all are finite."""
        return not_finite(self._run.store)

    def recompute_gradients(self, batches: Sequence[list[Array]], parameters: Mapping[str, Array]) -> None:
        """Recomputes the gradients of a step from the same batches, at other parameter values.

        Parameters and BatchNorm statistics are restored afterwards, even if the recomputed loss is NaN.
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
            self._freezing.clear_gradients()
            self._require_finite_results([step for step, _ in done])
        finally:
            for name, value in kept.items():
                store.parameters[name].write(value)
            # A step updates running statistics once, from the activations of the parameters being trained.
            statistics.restore()

    def _restore_and_raise(self, reason: Diverged) -> NoReturn:
        """Restores and saves the last good state, then raises DivergenceError."""
        state, position, store = self._state, self._state.position, self._run.store
        # Read before the snapshot is restored, because the message names the failed step.
        epoch, step = position.epoch + 1, -(-position.batch // self._plan.accumulate)
        # The position counts a step once it is updated.
        if not reason.of_update:
            step += 1
        rate = self._run.optimizer.get_learning_rate()
        self._statistics.restore()
        # The gradients belong to a step that was not taken; api.Optimizer then refuses to use them.
        store.gradients_valid = False
        # Usually the step was refused before its update, so the parameters are good, unless an earlier update
        # overflowed.
        if reason.of_update or not finite_parameters(store):
            self.restore()
            position = state.position
        kept = f"epoch {position.epoch + 1}, before step {position.batch // self._plan.accumulate + 1}"
        position.unfinished = True
        where = state.save_and_keep()
        remedy = reason.remedy or (
            f"Lower the learning rate, clip gradients ({argument('clip_grad_norm', 1.0)}), or scale the "
            "inputs and targets to about [-1, 1]."
        )
        raise DivergenceError(
            f"Training stopped in epoch {epoch}, step {step}: {reason} (learning rate {rate:g}). The "
            f"parameters are those of {kept}, saved in '{where}'. {remedy}"
        ) from None


class Diverged(Exception):
    """Raised when a step produces NaN or infinity; the handler restores the last good state.

    Args:
        reason: description of the non-finite values, for error messages.
        remedy: advice for the error message; None for the default advice.
        of_update: True if the updated values are not finite; False if the loss or the gradients are not.
    """

    def __init__(self, reason: str, remedy: str | None = None, *, of_update: bool = False) -> None:
        super().__init__(reason)
        self.remedy = remedy
        self.of_update = of_update


class _StepGradients(StepGradients):
    """Gradients of the current step, for callbacks.

    Args:
        stepper: object that takes the steps of the fit.
        batches: the step's batches.
    """

    def __init__(self, stepper: Stepper, batches: Sequence[list[Array]]) -> None:
        self._stepper = stepper
        self._batches = batches

    def values(self) -> dict[str, Array]:
        store = self._stepper._run.store
        if store.row_gradients:
            raise InputError(
                f"A callback reads the gradients, but the gradients of {', '.join(store.row_gradients)} "
                "are sparse. Leave sparse_gradients out."
            )
        # Copies, because recompute_at writes to the same memory.
        return {
            name: np.array(widen(gradient.read(), gradient.dtype))
            for name, gradient in store.gradients.items()
        }

    def recompute_at(self, parameters: Mapping[str, Array]) -> None:
        self._stepper.recompute_gradients(self._batches, parameters)
