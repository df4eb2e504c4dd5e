"""Defines `DataParallel`, the options for training one model with several workers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from onnxtrain.errors import InputError


@dataclass(frozen=True)
class DataParallel:
    """Options for training one model with several workers, each of which computes the gradient of its share of a batch.

    The batch of a step is split into one share per worker. The gradients of the shares are all-reduced, each weighted
    by the number of samples or labels over which its loss is averaged. The step therefore equals a step of a single
    process with the whole batch.

    Args:
        bucket_mb: send gradients in buckets of about this many MiB, e.g. 25.0. Larger tensors are sent separately.
        compression: "bf16" sends gradients as bfloat16: half the traffic, but only 8 bits of precision. None sends them
            uncompressed.
        shard_optimizer: True keeps the optimizer state of each parameter on a single worker (ZeRO stage 1), which
            updates the parameter and sends it to the others. The saved files don't change.
        save_steps: number of optimizer steps between saves of the run to its directory, e.g. 500, in addition to the
            end of each epoch. If a worker is killed, the run resumes from the last save. None saves only after epochs.
        backend: "gloo" communicates through host memory, "nccl" through the memory of NVIDIA GPUs.
        timeout: seconds after which a worker stops waiting for the others, e.g. 1800.0.

    Raises:
        InputError: a value is out of range.

    Example:
        >>> from onnxtrain.distributed import DataParallel
        >>> DataParallel(compression="bf16").bucket_mb
        25.0
    """

    bucket_mb: float = 25.0
    compression: Literal["bf16"] | None = None
    shard_optimizer: bool = False
    save_steps: int | None = None
    backend: Literal["gloo", "nccl"] = "gloo"
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        for name in ("bucket_mb", "timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise InputError(f"DataParallel: {name} must be a number > 0, received {value!r}.")
        steps = self.save_steps
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise InputError(f"DataParallel: save_steps must be an integer >= 1 or None, received {steps!r}.")
        for name, choices in (("compression", (None, "bf16")), ("backend", ("gloo", "nccl"))):
            if getattr(self, name) not in choices:
                raise InputError(
                    f"DataParallel: {name} must be one of {', '.join(map(repr, choices))}, received "
                    f"{getattr(self, name)!r}."
                )

    @property
    def bucket_bytes(self) -> int:
        """Size of a bucket in bytes."""
        return int(self.bucket_mb * 2**20)


Strategy = Literal["ddp"] | DataParallel
"""Type of the `strategy` argument of `Trainer`; "ddp" stands for `DataParallel()`."""


def make_strategy(strategy: Strategy | None) -> DataParallel | None:
    """Returns the options for the `strategy` argument of `Trainer`; None stands for a single process.

    Raises:
        InputError: the argument is not "ddp", a `DataParallel` or None.
    """
    if strategy is None or isinstance(strategy, DataParallel):
        return strategy
    if strategy == "ddp":
        return DataParallel()
    raise InputError(f"strategy must be 'ddp', a DataParallel or None, received {strategy!r}.")
