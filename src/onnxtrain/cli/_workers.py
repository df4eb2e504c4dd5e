"""Runs `onnxtrain train` on several workers: starts them, and gives each its part of the command."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from onnxtrain._words import speaking
from onnxtrain.cli._output import INTERRUPTED
from onnxtrain.cli._remember import PROPERTY as OPTIONS
from onnxtrain.cli._shell_words import ShellWords
from onnxtrain.cli._train_options import TrainOptions, WorkerOptions
from onnxtrain.distributed import launch
from onnxtrain.distributed._join import join_group, read_place
from onnxtrain.distributed._strategy import DataParallel
from onnxtrain.errors import InputError, OnnxTrainError, WorkersError
from onnxtrain.runtime.artifact_folder import own_file
from onnxtrain.runtime.atomic import finish_interrupted
from onnxtrain.runtime.checkpoint import read_checkpoint
from onnxtrain.runtime.state import CheckpointState
from onnxtrain.trainer._run.position import PROPERTY, Position
from onnxtrain.trainer._run.run import CHECKPOINT


class _Saved(NamedTuple):
    """State of a run in its directory: number of finished epochs, and True if a fit was interrupted."""

    epochs: int
    unfinished: bool


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


def start_workers(options: TrainOptions, given: frozenset[str], directory: Path) -> None:
    """Starts the workers of a command and waits for their end; `directory` is that of the run.

    Raises:
        OnnxTrainError: the command failed, or a worker did, more often than --restarts.
    """
    # Ray puts the number of the process before each line that a worker prints.
    if options.json and options.workers.hosts is not None:
        raise InputError(
            "--json is given with --hosts, and Ray changes what workers print. Leave --json out; `onnxtrain inspect "
            "RUN --json` prints the record of the run."
        )
    before = _saved(directory) if options.source.is_dir() else None
    restarts = 3 if options.workers.restarts is None else options.workers.restarts
    arguments = (options, given, directory, 0 if before is None else before.epochs)
    assert options.workers.workers is not None
    ends = launch(
        work,
        *arguments,
        workers=options.workers.workers,
        restarts=restarts,
        hosts=options.workers.hosts,
    )
    failures = [end for end in ends if isinstance(end, OnnxTrainError)]
    # The error of the worker that failed, not those of the others about it.
    failures.sort(key=lambda error: isinstance(error, WorkersError))
    if failures:
        raise failures[0]
    if INTERRUPTED in ends:
        sys.exit(INTERRUPTED)


def work(
    options: TrainOptions, given: frozenset[str], directory: Path, epochs_before: int
) -> OnnxTrainError | int:
    """Does the part of one worker; returns the exit code, or the error of a command that cannot succeed.

    Args:
        options: options of the command.
        given: names of the options that were given.
        directory: directory of the run.
        epochs_before: epochs of the run that were finished when the command was given.
    """
    from onnxtrain.cli._train import train

    # Ctrl-C in a terminal reaches all processes of the group. The launcher passes it on: it must not come twice.
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    strategy = chosen_strategy(options.workers)
    assert strategy is not None
    finished = False
    # All workers have to decide the same, and worker 0 may have saved before another one looks.
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        group = join_group(strategy)
        saved = group.share(_saved(directory) if group.rank == 0 else None)
        if saved is None:
            options = replace(options, overwrite=True)
        else:
            options = replace(options, source=directory, output=None, overwrite=False)
            finished = not saved.unfinished and saved.epochs > epochs_before
    try:
        # An error has the words of the shell also where it is made: in this process.
        with quiet_unless_leading(), speaking(ShellWords()):
            train(options, given, finished=finished)
    except WorkersError:
        # Another worker has ended: starting all of them again may help.
        raise
    except OnnxTrainError as error:
        return error
    except SystemExit as end:
        # PyTorch's agent, which has passed Ctrl-C on, waits for the end of the process and takes no result any more.
        if end.code == INTERRUPTED and "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
            raise
        return int(end.code or 0)
    return 0


def _saved(directory: Path) -> _Saved | None:
    """Reads how far the run in a directory has come; None if it cannot go on."""
    try:
        path = own_file(directory, CHECKPOINT)
        finish_interrupted(path)
        properties = CheckpointState(read_checkpoint(path)).properties
    except (OnnxTrainError, OSError):
        return None
    # A run whose options were not written yet has not begun to train.
    if PROPERTY not in properties or OPTIONS not in properties:
        return None
    position, _, _ = Position.from_json(str(properties[PROPERTY]), f"'{directory}'")
    return _Saved(position.epoch, position.unfinished)
