"""Defines `LinearLRScheduler`, source compatible with onnxruntime-training: warm-up, then linear decay."""

from __future__ import annotations

import numbers

from onnxtrain.errors import InputError
from onnxtrain.runtime.not_copyable import NotCopyable
from onnxtrain.runtime.optimizer import Optimizer, check_learning_rate


class LinearLRScheduler(NotCopyable):
    """Increases the learning rate linearly from 0 to `initial_lr`, then decreases it linearly to 0.

    After t optimizer steps, the learning rate is::

        t < warmup_step_count:   initial_lr * t / warmup_step_count
        t < total_step_count:    initial_lr * (total_step_count - t) / (total_step_count - warmup_step_count)
        later:                   0

    The constructor sets the rate for the current t, so the first optimizer step of a new run uses the rate for t = 0.
    Call :meth:`step` after each `optimizer.step()` to set the next rate. The optimizer's step count t is saved with its
    state, so in a run resumed from a checkpoint, a scheduler with the same arguments continues the schedule.

    Args:
        optimizer: the optimizer whose learning rate is set.
        warmup_step_count: number of warm-up steps, e.g. 100; 0 for none.
        total_step_count: total number of warm-up and decay steps, e.g. 1000.
        initial_lr: the highest rate, e.g. 1e-3.

    Raises:
        InputError: a count is negative or not an integer, the total is 0 or less than the warm-up, or the rate is not a
            non-negative finite number.
    """

    def __init__(
        self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float
    ) -> None:
        # numpy's integers are Integral as well. So is True, which is not a valid count.
        counts = (warmup_step_count, total_step_count)
        are_integers = all(isinstance(c, numbers.Integral) and not isinstance(c, bool) for c in counts)
        if not are_integers or not 0 <= warmup_step_count <= total_step_count or total_step_count == 0:
            raise InputError(
                "LinearLRScheduler: expected integers with 0 <= warmup_step_count <= total_step_count and "
                f"total_step_count > 0, received warmup_step_count={warmup_step_count!r}, "
                f"total_step_count={total_step_count!r}."
            )
        self._optimizer = optimizer
        self._warmup = warmup_step_count
        self._total = total_step_count
        self._initial = check_learning_rate(initial_lr)
        # Stored in the checkpoint, as in those of onnxruntime-training.
        optimizer.set_initial_learning_rate(self._initial)
        self.step()

    def step(self) -> None:
        """Sets the learning rate for the optimizer's next step, based on the optimizer's step count."""
        with self._optimizer.lock:
            self._optimizer.set_learning_rate(self._rate(self._optimizer.step_count))

    def _rate(self, step: int) -> float:
        """Returns the learning rate after `step` optimizer steps."""
        # As documented by onnxruntime-training, whose code swaps the two counts.
        if step < self._warmup:
            return self._initial * step / self._warmup
        if step < self._total:
            return self._initial * (self._total - step) / (self._total - self._warmup)
        return 0.0
