"""Determines this process's role among the workers of `onnxtrain train`, and creates the workers' strategy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from onnxtrain.cli._train_options import WorkerOptions
from onnxtrain.distributed._join import read_place
from onnxtrain.distributed._strategy import DataParallel
from onnxtrain.errors import InputError


def leads() -> bool:
    """True if this process prints output and writes files: it is the only process, or the worker with rank 0."""
    place = read_place(os.environ)
    return place is None or place[0] == 0


def chosen_strategy(options: WorkerOptions) -> DataParallel | None:
    """Creates the data-parallel strategy of a worker; returns None if this process is not a worker."""
    if read_place(os.environ) is None:
        return None
    return DataParallel(
        shard_optimizer=options.shard_optimizer,
        compression=options.compress,
        save_steps=options.save_steps,
    )


@contextlib.contextmanager
def quiet_unless_leading() -> Iterator[None]:
    """Context manager that discards this process's output, unless it is the only process or has rank 0."""
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
    """True if this process has to start workers, because `--workers` is given and it is not a worker itself.

    Raises:
        InputError: other options for workers are given without `--workers`.
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
