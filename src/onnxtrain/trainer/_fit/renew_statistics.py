"""Recomputes the running statistics of BatchNormalization for averaged parameters."""

from __future__ import annotations

import numpy as np

from onnxtrain._words import argument
from onnxtrain.errors import DivergenceError
from onnxtrain.runtime.dtypes import Array, narrow, widen
from onnxtrain.trainer._fit.state import TrainingState
from onnxtrain.trainer._fit.step import seed_run
from onnxtrain.trainer.data import Pass, Source


def renew_statistics(state: TrainingState, data: Source) -> None:
    """Recomputes the BatchNorm running statistics for averaged parameters, like `torch.optim.swa_utils.update_bn`.

    The statistics become the means of the batch statistics over one epoch of training data. All batches have the same
    weight, regardless of size. Frozen statistics are not changed.

    Args:
        state: models and tensors.
        data: training data. Its batches are read in the order of the epoch that would be trained next.

    Raises:
        DivergenceError: the statistics of a batch are not finite; the old statistics are kept.
    """
    position, plan, run = state.position, state.position.plan, state.run
    statistics = run.store.statistics
    with state.lock:
        if not statistics:
            return
        before = {name: buffer.read().copy() for name, buffer in statistics.items()}

        def updated(arrays: list[Array], start: float, index: int) -> dict[str, Array]:
            """Sets all statistics to `start`, runs a training batch, and returns the updated statistics."""
            for buffer in statistics.values():
                buffer.write(narrow(np.full(buffer.shape, start, np.float32), buffer.dtype))
            # Otherwise the gradients of all batches would accumulate, and overflow.
            run.module.lazy_reset_grad()
            seed_run(state, index)
            run.step(arrays, training=True)
            # bfloat16 is stored as raw bits.
            wide = {name: widen(buffer.read(), buffer.dtype) for name, buffer in statistics.items()}
            return {name: value.astype(np.float64) for name, value in wide.items()}

        totals: dict[str, Array] = {}
        momenta: dict[str, float] = {}
        count = 0
        shuffle = plan is not None and plan.shuffle
        epoch = Pass(position.seed, position.epoch, position.fit_start, shuffle, True)
        try:
            for count, arrays in enumerate(data.read(epoch), start=1):
                # A node returns momentum * running + (1 - momentum) * batch. Starting from 0 gives the batch statistics
                # times (1 - momentum); starting from 1 adds the momentum.
                values = updated(arrays, 0.0, count)
                if not momenta:
                    ones = updated(arrays, 1.0, count)
                    momenta = {name: _momentum(values[name], ones[name]) for name in statistics}
                totals = {name: totals.get(name, 0.0) + value for name, value in values.items()}
            results = {
                name: totals[name] / (count * (1 - momentum))
                for name, momentum in momenta.items()
                # A momentum of 1 means frozen statistics.
                if momentum < 1 - 1e-6
            }
            if not all(np.isfinite(value).all() for value in results.values()):
                raise DivergenceError(
                    "Recomputing the statistics of BatchNormalization: a batch has NaN or infinite "
                    "statistics. A batch of one sample has no variance; drop it with "
                    f"{argument('drop_last', True)}."
                )
        except BaseException:
            results = {}
            raise
        finally:
            for name, buffer in statistics.items():
                if name in results:
                    wide = widen(before[name], buffer.dtype).dtype
                    buffer.write(narrow(results[name].astype(wide), buffer.dtype))
                else:
                    buffer.write(before[name])
            # The gradients of these runs belong to no step.
            run.store.gradients_valid = False
            run.module.lazy_reset_grad()


def _momentum(from_zero: Array, from_one: Array) -> float:
    """Computes the momentum of a BatchNormalization node from two runs on the same batch.

    The node returns `momentum * running + (1 - momentum) * batch`, so the results of the two runs, which start from
    running statistics of 0 and 1, differ by the momentum. Uses the element with the least cancellation.

    Args:
        from_zero: statistics after the batch, if they were 0 before it.
        from_one: statistics after the batch, if they were 1 before it.
    """
    index = np.abs(from_zero).argmin()
    return float((from_one - from_zero).reshape(-1)[index])
