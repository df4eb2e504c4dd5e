"""Computes the running statistics of BatchNormalization anew, for parameters that training has not been through."""

from __future__ import annotations

import numpy as np

from onnxtrain._words import argument
from onnxtrain.errors import DivergenceError
from onnxtrain.runtime.dtypes import Array, narrow, widen
from onnxtrain.trainer._fit.state import TrainingState
from onnxtrain.trainer._fit.step import seed_run
from onnxtrain.trainer.data import Pass, Source


def renew_statistics(state: TrainingState, data: Source) -> None:
    """Sets the running statistics to the means of the batch statistics over a pass, as `swa_utils.update_bn` does.

    Each batch counts the same, whatever its size. Statistics that training does not update stay as they are.

    Args:
        state: models and tensors.
        data: data to train on; its order is that of the epoch that would come next.

    Raises:
        DivergenceError: a batch has statistics that are not finite; the old ones are kept.
    """
    position, plan, run = state.position, state.position.plan, state.run
    statistics = run.store.statistics
    with state.lock:
        if not statistics:
            return
        before = {name: buffer.read().copy() for name, buffer in statistics.items()}

        def updated(arrays: list[Array], start: float, index: int) -> dict[str, Array]:
            """Runs a training step without an update, from statistics that all have one value."""
            for buffer in statistics.values():
                buffer.write(narrow(np.full(buffer.shape, start, np.float32), buffer.dtype))
            # Without a reset the gradients of all batches would be added up, and overflow.
            run.module.lazy_reset_grad()
            seed_run(state, index)
            run.step(arrays, training=True)
            # bfloat16 is read as raw bits.
            wide = {name: widen(buffer.read(), buffer.dtype) for name, buffer in statistics.items()}
            return {name: value.astype(np.float64) for name, value in wide.items()}

        totals: dict[str, Array] = {}
        momenta: dict[str, float] = {}
        count = 0
        shuffle = plan is not None and plan.shuffle
        epoch = Pass(position.seed, position.epoch, position.fit_start, shuffle, True)
        try:
            for count, arrays in enumerate(data.read(epoch), start=1):
                # A node gives momentum * running + (1 - momentum) * batch: from running statistics of 0 that is a
                # multiple of those of the batch, and from 1 it is larger by the momentum.
                values = updated(arrays, 0.0, count)
                if not momenta:
                    ones = updated(arrays, 1.0, count)
                    momenta = {name: _momentum(values[name], ones[name]) for name in statistics}
                totals = {name: totals.get(name, 0.0) + value for name, value in values.items()}
            results = {
                name: totals[name] / (count * (1 - momentum))
                for name, momentum in momenta.items()
                # 1: frozen statistics, which the node passes on.
                if momentum < 1 - 1e-6
            }
            if not all(np.isfinite(value).all() for value in results.values()):
                raise DivergenceError(
                    "Renewing the statistics of BatchNormalization: those of a batch are NaN or infinite. A batch of "
                    f"one sample has no variance; leave it out with {argument('drop_last', True)}."
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
    """Computes the momentum of a node, from the element where least is cancelled."""
    index = np.abs(from_zero).argmin()
    return float((from_one - from_zero).reshape(-1)[index])
