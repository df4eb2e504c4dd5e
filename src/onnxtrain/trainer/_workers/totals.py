"""Sums losses and metrics over the workers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxtrain.distributed._communicator import Communicator
from onnxtrain.runtime.dtypes import Array
from onnxtrain.trainer._metrics.metrics import Averages, Metric


def measured_keys(metrics: Sequence[Metric]) -> list[str]:
    """Returns the keys whose values are summed over batches: the loss, and metrics that are means."""
    return ["loss", *(metric.name for metric in metrics if metric.measure is not None)]


def numbers_of(averages: Averages, keys: Sequence[str]) -> Array:
    """Returns the total and the count of each key, float64 [2 * len(keys)]; zeros for keys not yet recorded."""
    return np.array([number for key in keys for number in averages.sums.get(key, (0.0, 0.0))], np.float64)


def averages_of(numbers: Array, keys: Sequence[str], *, summed: bool) -> Averages:
    """Converts all-reduced totals and counts to averages; the inverse of :func:`numbers_of`.

    Args:
        numbers: totals and counts, float64 [2 * len(keys)].
        keys: the keys.
        summed: True if the loss is a sum, not a mean; its count is then 1, regardless of the number of batches.
    """
    sums = {
        key: [float(total), float(count)]
        for key, (total, count) in zip(keys, numbers.reshape(-1, 2), strict=True)
    }
    if summed:
        sums["loss"][1] = min(1.0, sums["loss"][1])
    return Averages(sums)


def add_averages(total: Averages, more: Averages, *, summed: bool) -> None:
    """Adds a step's averages to the totals of the epoch, in place.

    Args:
        total: totals of the epoch; modified.
        more: averages of the step.
        summed: True if the loss is a sum, not a mean; its count then stays 1.
    """
    for key, (amount, count) in more.sums.items():
        total.add(key, amount, 0.0 if summed and key == "loss" and key in total.sums else count)
    total.parts += more.parts


def total_averages(
    communicator: Communicator, averages: Averages, metrics: Sequence[Metric], *, summed: bool
) -> Averages:
    """Combines the averages that the workers computed over their batches of a dataset.

    Args:
        communicator: connection to the other workers.
        averages: averages of this worker.
        metrics: recorded metrics.
        summed: True if the loss is a sum over samples, not a mean.
    """
    keys = measured_keys(metrics)
    # Sums are combined, not means: means over different numbers of samples cannot be averaged.
    numbers = numbers_of(averages, keys)
    communicator.sum([numbers])
    total = averages_of(numbers, keys, summed=summed)
    if any(metric.function is not None for metric in metrics):
        gathered = communicator.gather(averages.parts)
        # Worker r evaluated the batches r, r + size, ...; interleaving them restores the order of the data.
        longest = max(map(len, gathered))
        total.parts = [parts[index] for index in range(longest) for parts in gathered if index < len(parts)]
    return total
