"""Takes optimizer steps with several workers; each worker computes the gradients of its share of the samples."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxtrain.runtime.dtypes import Array, narrow, widen
from onnxtrain.trainer._fit.interrupt import InterruptGuard
from onnxtrain.trainer._fit.step import Diverged, Fit, Stepper, seed_run
from onnxtrain.trainer._metrics.metrics import Averages
from onnxtrain.trainer._run.run import Step
from onnxtrain.trainer._workers.group import WorkerGroup
from onnxtrain.trainer._workers.totals import add_averages, averages_of, measured_keys, numbers_of

# Indices in the vector that the workers all-reduce at each step; sums of loss and metrics follow.
_FAILED, _ASKED, _SAMPLES, _COUNT, _LOSS, _DONE, _UNCOUNTED = range(7)
_SUMS = 7


class SharedInterrupt(InterruptGuard):
    """Records Ctrl-C in this worker; all workers stop after the same step, once they have exchanged the request."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = False

    def _handle(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class WorkerStepper(Stepper):
    """Takes optimizer steps together with the other workers.

    If the loss is a mean over samples or labels, the gradient of the whole batch is the sum of the workers' gradients,
    each weighted by its worker's fraction of the total count. If the loss is a sum, the gradients are added.

    Args:
        fit: data, plan and state of the fit.
        workers: the group of workers.
    """

    one_batch = "its share of a batch"

    def __init__(self, fit: Fit, workers: WorkerGroup) -> None:
        super().__init__(fit)
        self._workers = workers
        self._interrupt = SharedInterrupt()
        self._keys = measured_keys(self._state.metrics)
        # Loss and metrics of the step, over all workers.
        self._step_averages = Averages()
        self._samples = 0

    def guard(self) -> InterruptGuard:
        """Returns a Ctrl-C handler that stops all workers after the same step."""
        return self._interrupt

    def step(self, batches: Sequence[list[Array]]) -> int:
        """Takes one step, and saves the run every `save_steps` steps; returns the number of samples of all workers."""
        super().step(batches)
        state, every = self._state, self._workers.strategy.save_steps
        if every is not None and state.position.step % every == 0 and not state.workspace.temporary:
            state.save(state.directory)
        return self._samples

    def _is_used(self, step: int) -> bool:
        """True if the parameters after this step are evaluated or saved before the next step."""
        every = self._workers.strategy.save_steps
        return super()._is_used(step) or (every is not None and step % every == 0)

    def _not_finite(self) -> str | None:
        """Returns which tensors are not finite on some worker, e.g. "parameters"; None if all are finite.

        Each worker checks its own shard of the optimizer state.
        """
        told = self._workers.communicator.gather(super()._not_finite())
        return next((what for what in told if what is not None), None)

    def _accumulate(self, batches: Sequence[list[Array]]) -> tuple[list[tuple[Step, float | None]], float]:
        """Computes the gradients of the mean loss over the batches of all workers.

        The all-reduced gradients are written to the store of each worker.

        Returns:
            The results of the shares that this worker did not skip, each with its weight in the mean; and the mean loss
            over all workers, which is NaN if all labels are ignored.

        Raises:
            Diverged: the loss, the gradients or the running statistics are not finite on one of the workers.
        """
        # A worker may have no samples of a small batch.
        own = [arrays for arrays in batches if arrays and len(arrays[0])]
        done: list[tuple[Step, float | None]] = []
        diverged: Diverged | None = None
        try:
            done, _ = super()._accumulate(own)
            # Each worker checks its own running statistics; gradients are checked again once they are summed.
            if done:
                self._require_finite_results([step for step, _ in done])
        except Diverged as error:
            diverged, done = error, []
        totals, averages = self._exchange(own, done, diverged)
        if totals[_UNCOUNTED] and totals[_DONE] and (self._needs_predictions or self._run.store.statistics):
            self._run_ignored_shares(batches, averages, keep_gradients=bool(done))
        mean = self._sum_gradients(done, totals)
        self._workers.broadcast_statistics(self._run.store)
        self._step_averages, self._samples = averages, int(totals[_SAMPLES])
        return done, mean

    def _exchange(
        self, own: Sequence[list[Array]], done: list[tuple[Step, float | None]], diverged: Diverged | None
    ) -> tuple[Array, Averages]:
        """All-reduces counts, losses and metrics.

        Args:
            own: this worker's shares of the batches.
            done: results of the shares that were not skipped.
            diverged: the error, if the step diverged on this worker.

        Returns:
            The all-reduced vector: counts and losses, indexed by the constants `_FAILED` to `_UNCOUNTED`, followed by
            the totals and counts of loss and metrics; and the averages over all workers.

        Raises:
            Diverged: the step diverged on one of the workers; the error is raised on all of them.
        """
        averages = Averages()
        for step, count in done:
            self._state.add(averages, step, count)
        # One message for all numbers of a step: each message waits for the slowest worker.
        numbers = np.zeros(_SUMS + 2 * len(self._keys))
        numbers[_FAILED], numbers[_ASKED] = diverged is not None, self._interrupt.asked
        numbers[_SAMPLES] = sum(len(arrays[0]) for arrays in own)
        numbers[_COUNT] = sum(count or 0.0 for _, count in done)
        numbers[_LOSS] = sum(step.loss * (1.0 if count is None else count) for step, count in done)
        numbers[_DONE], numbers[_UNCOUNTED] = len(done), len(own) - len(done)
        numbers[_SUMS:] = numbers_of(averages, self._keys)
        self._workers.communicator.sum([numbers])
        # All workers see the same sum, so they stop after the same step.
        self._interrupt.requested = bool(numbers[_ASKED])
        if numbers[_FAILED]:
            told = self._workers.communicator.gather(diverged and (str(diverged), diverged.remedy))
            rank, (reason, remedy) = next((r, entry) for r, entry in enumerate(told) if entry is not None)
            raise Diverged(f"on worker {rank}, {reason}", remedy)
        total = averages_of(numbers[_SUMS:], self._keys, summed=self._run.manifest.loss_mean is None)
        total.parts = self._gather_parts(averages)
        return numbers, total

    @property
    def _needs_predictions(self) -> bool:
        """True if a metric needs the predictions of a step."""
        return any(metric.looks_at_predictions for metric in self._state.metrics)

    def _gather_parts(self, averages: Averages) -> list[tuple[Array, ...]]:
        """Returns the predictions and targets of all workers; [] if no metric is a function of the whole dataset."""
        if all(metric.function is None for metric in self._state.metrics):
            return []
        return [part for parts in self._workers.communicator.gather(averages.parts) for part in parts]

    def _run_ignored_shares(
        self, batches: Sequence[list[Array]], averages: Averages, *, keep_gradients: bool
    ) -> None:
        """Runs shares whose labels are all ignored, if another worker has non-ignored labels in the same batch.

        A single process would run these samples with the rest of the batch: they affect metrics and BatchNormalization,
        but not the loss. Loss and gradients of such a share alone are 0 / 0, and are dropped.

        Args:
            batches: this worker's shares of the batches.
            averages: averages of the step; the metrics of these shares, from all workers, are added in place.
            keep_gradients: True if the store contains gradients of other shares of the step.
        """
        store, state = self._run.store, self._state
        sizes = [len(arrays[0]) if arrays else 0 for arrays in batches]
        counts = np.array(
            [
                (state.loss_count(arrays) or 0.0) if size else 0.0
                for arrays, size in zip(batches, sizes, strict=True)
            ]
        )
        totals = counts.copy()
        self._workers.communicator.sum([totals])
        kept = [(buffer, buffer.read().copy()) for buffer in store.gradients.values() if keep_gradients]
        # Running the model allocates new memory for sparse gradients, so the old arrays need no copy.
        kept_rows = [
            (rows, (rows.rows, rows.indices)) for rows in store.row_gradients.values() if keep_gradients
        ]
        measured = Averages()
        uncounted = np.flatnonzero((counts == 0) & (totals != 0) & (np.array(sizes) != 0))
        for index in map(int, uncounted):
            seed_run(state, index)
            loss, outputs = self._run.step(batches[index], training=True)
            state.add(measured, Step(batches[index], loss, outputs), 0.0)
        for buffer, value in kept:
            buffer.write(value)
        for rows, values in kept_rows:
            rows.replace(*values)
        numbers = numbers_of(measured, self._keys)
        self._workers.communicator.sum([numbers])
        more = averages_of(numbers, self._keys, summed=False)
        more.parts = self._gather_parts(measured)
        add_averages(averages, more, summed=False)

    def _sum_gradients(self, done: list[tuple[Step, float | None]], totals: Array) -> float:
        """All-reduces the gradients in the store; returns the mean loss, NaN if all labels are ignored.

        Args:
            done: results of this worker's shares that were not skipped, with their weights in the mean loss.
            totals: the all-reduced vector from :meth:`_exchange`.
        """
        if not totals[_DONE]:
            return math.nan
        store, total = self._run.store, float(totals[_COUNT])
        # Otherwise gradients of an earlier step would be added to the others' gradients.
        if not done:
            self._clear_gradients()
        elif total:
            self._scale_gradients(sum(count or 0.0 for _, count in done) / total)
        strategy = self._workers.strategy
        buffers = list(store.gradients.values())
        # On the CPU, these are the gradients themselves, except in half precision.
        values = [widen(buffer.read(), buffer.dtype) for buffer in buffers]
        self._workers.communicator.sum(
            values, strategy.bucket_bytes, compressed=strategy.compression == "bf16"
        )
        for buffer, value in zip(buffers, values, strict=True):
            if not np.shares_memory(buffer.read(), value):
                buffer.write(narrow(value, buffer.dtype))
        for rows in store.row_gradients.values():
            # Concatenated by rank; the optimizer accumulates entries of the same row.
            parts = self._workers.communicator.gather((rows.read(), rows.indices.numpy()))
            gradients, indices = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            device = rows.device
            rows.replace(
                *(
                    ort.OrtValue.ortvalue_from_numpy(a, device.type, device.index)
                    for a in (gradients, indices)
                )
            )
        return float(totals[_LOSS]) / total if total else float(totals[_LOSS])

    def _clear_gradients(self) -> None:
        """Sets the gradients to zero on a worker that contributes none to the step, for the all-reduce."""
        store = self._run.store
        for buffer in store.gradients.values():
            buffer.write(np.zeros(buffer.shape, buffer.dtype.storage))
        for rows in store.row_gradients.values():
            rows.clear()
        # The optimizer refuses gradients that no training step has computed; zeros are valid here.
        store.gradients_valid = True
        store.gradient_owner.replaced()

    def _record(self, done: Sequence[tuple[Step, float | None]], batches: Sequence[list[Array]]) -> None:
        """Adds loss and metrics of all workers to the averages of the epoch."""
        summed = self._run.manifest.loss_mean is None
        add_averages(self._state.position.averages, self._step_averages, summed=summed)

    def recompute_gradients(self, batches: Sequence[list[Array]], parameters: Mapping[str, Array]) -> None:
        """Recomputes the gradients of all workers at other parameter values; recorded losses are not changed."""
        with self._kept_averages():
            super().recompute_gradients(batches, parameters)

    @contextlib.contextmanager
    def _kept_averages(self) -> Iterator[None]:
        kept = self._step_averages
        try:
            yield
        finally:
            self._step_averages = kept
