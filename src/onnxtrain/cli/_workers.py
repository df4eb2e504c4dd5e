"""Tells the place of this process among the workers of `onnxtrain train`, and makes their strategy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from onnxtrain.cli._train_options import WorkerOptions
from onnxtrain.distributed._join import read_place
from onnxtrain.distributed._strategy import DataParallel
from onnxtrain.errors import InputError


def leads() -> bool:
    """Tells if this process writes files and prints: it is the only one, or the first of several workers."""
    place = read_place(os.environ)
    return place is None or place[0] == 0


def chosen_strategy(options: WorkerOptions) -> DataParallel | None:
    """Makes the strategy of a worker; None in a process that was started alone."""
    if read_place(os.environ) is None:
        return None
    return DataParallel(
        shard_optimizer=options.shard_optimizer,
        compression=options.compress,
        save_steps=options.save_steps,
    )


@contextlib.contextmanager
def quiet_unless_leading() -> Iterator[None]:
    """Drops what workers print, but for the first of them."""
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
    """Tells if this process starts workers instead of being one. Raises InputError: options need --workers."""
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
