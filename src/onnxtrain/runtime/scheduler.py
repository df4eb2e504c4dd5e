"""`LinearLRScheduler`: warm-up, then linear decay of the learning rate."""

from __future__ import annotations

import numbers

from onnxtrain.errors import InputError
from onnxtrain.runtime.optimizer import Optimizer, check_learning_rate


class LinearLRScheduler:
    """Raises the learning rate linearly from 0 to `initial_lr`, then lowers it linearly to 0.

    With t the number of optimizer steps taken::

        t < warmup_step_count:   initial_lr * t / warmup_step_count
        t < total_step_count:    initial_lr * (total_step_count - t) / (total_step_count - warmup_step_count)
        later:                   0

    The rate for the current t is set at once, so the first optimizer step runs with the rate for t = 0, and
    :meth:`step` after each `optimizer.step()` sets the next one. As t is the optimizer's own count, which is
    part of the optimizer state in a checkpoint, a scheduler made with the same arguments after resuming goes
    on where the run stopped.

    Args:
        optimizer: Whose learning rate is set.
        warmup_step_count: Steps of the warm-up, 0 for none.
        total_step_count: Steps of warm-up and decay together.
        initial_lr: The highest rate.

    Raises:
        InputError: Negative or non-integer counts, fewer total than warm-up steps, or a bad rate.
    """

    def __init__(
        self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float
    ) -> None:
        counts = (warmup_step_count, total_step_count)
        whole = all(isinstance(c, numbers.Integral) and not isinstance(c, bool) for c in counts)
        if not whole or not 0 <= warmup_step_count <= total_step_count or total_step_count == 0:
            raise InputError(
                "LinearLRScheduler: expected integers with 0 <= warmup_step_count <= total_step_count and "
                f"total_step_count > 0, received warmup_step_count={warmup_step_count!r}, "
                f"total_step_count={total_step_count!r}."
            )
        self._optimizer = optimizer
        self._warmup = warmup_step_count
        self._total = total_step_count
        self._initial = check_learning_rate(initial_lr)
        optimizer.set_initial_learning_rate(self._initial)
        self.step()

    def step(self) -> None:
        """Sets the learning rate for the number of steps that the optimizer has taken."""
        with self._optimizer.lock:
            self._optimizer.set_learning_rate(self._rate(self._optimizer.step_count))

    def _rate(self, step: int) -> float:
        if step < self._warmup:
            return self._initial * step / self._warmup
        if step < self._total:
            return self._initial * (self._total - step) / (self._total - self._warmup)
        return 0.0
