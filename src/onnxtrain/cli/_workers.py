"""Finds the place of this process among the workers of `onnxtrain train`, and creates their strategy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from onnxtrain.cli._train_options import WorkerOptions
from onnxtrain.distributed._join import read_place
from onnxtrain.distributed._strategy import DataParallel
from onnxtrain.errors import InputError


def leads() -> bool:
    """True if this process prints and writes files, because it is the only process or the worker of rank 0."""
    place = read_place(os.environ)
    return place is None or place[0] == 0


def chosen_strategy(options: WorkerOptions) -> DataParallel | None:
    """Returns the strategy of a worker, or None if this process is not a worker."""
    if read_place(os.environ) is None:
        return None
    return DataParallel(
        shard_optimizer=options.shard_optimizer,
        compression=options.compress,
        save_steps=options.save_steps,
    )


@contextlib.contextmanager
def quiet_unless_leading() -> Iterator[None]:
    """Discards the output of workers other than rank 0 inside the block."""
    if leads():
        yield
        return
    with (
        open(os.devnull, "w") as nothing,
        contextlib.redirect_stdout(nothing),
        contextlib.redirect_stderr(nothing),
    ):
        yield


def starts_workers(options: WorkerOptions) -> bool:
    """True if this process has to start workers and is not a worker itself.

    Raises:
        InputError: options for workers were given without `--workers`.
    """
    if options.workers is not None:
        return read_place(os.environ) is None
    given = [
        flag
        for flag, value in (
            ("--hosts", options.hosts),
            ("--restarts", options.restarts),
            ("--shard-optimizer", options.shard_optimizer),
            ("--compress", options.compress),
            ("--save-steps", options.save_steps),
        )
        if value
    ]
    if given and read_place(os.environ) is None:
        raise InputError(f"{', '.join(given)} given without --workers.")
    return False
