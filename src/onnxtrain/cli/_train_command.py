"""Runs `onnxtrain train` in this process, or starts workers that run it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import typer

from onnxtrain._words import speaking
from onnxtrain.cli._interrupts import report_saved_state_on_interrupt
from onnxtrain.cli._output import INTERRUPTED
from onnxtrain.cli._remember import BEGUN
from onnxtrain.cli._remember import PROPERTY as OPTIONS
from onnxtrain.cli._saved_run import saved_position, saved_properties
from onnxtrain.cli._shell_words import ShellWords
from onnxtrain.cli._train import resume_options, resumed_directory, run_directory, train
from onnxtrain.cli._train_options import TrainOptions
from onnxtrain.cli._workers import chosen_strategy, quiet_unless_leading, starts_workers
from onnxtrain.distributed import launch
from onnxtrain.distributed._join import join_group
from onnxtrain.errors import InputError, OnnxTrainError, WorkersError


class _Saved(NamedTuple):
    """Progress of a run, read from its checkpoint.

    Attributes:
        epochs: number of finished epochs.
        unfinished: True if a call to `fit` was interrupted.
    """

    epochs: int
    unfinished: bool


def run_command(options: TrainOptions, given: frozenset[str]) -> None:
    """Trains, writes the trained model to the directory of the run, and prints the results.

    Args:
        options: options of the command. For a resumed run, its stored values replace the options that were not given.
        given: names of the options that were given on the command line or in an options file.
    """
    if options.data is None and resumed_directory(options) is None:
        raise typer.BadParameter(
            "a new run needs data. Pass an .npz file with arrays named like the model's inputs and targets, or x "
            "and y; a .csv, .tsv or .parquet table; or a folder of images.",
            param_hint="'--data'",
        )
    with (
        report_saved_state_on_interrupt(run_directory(options), resume_options(options)),
        quiet_unless_leading(),
    ):
        if starts_workers(options.workers):
            _start_workers(options, given, run_directory(options))
        else:
            train(options, given)


def _start_workers(options: TrainOptions, given: frozenset[str], directory: Path) -> None:
    """Starts the worker processes of the command, and waits for them to exit.

    Args:
        options: options of the command.
        given: names of the options that were given.
        directory: directory of the run.

    Raises:
        OnnxTrainError: the command failed, or workers failed more often than `--restarts` allows.
    """
    # Ray prefixes each line that a worker prints.
    if options.json and options.workers.hosts is not None:
        raise InputError(
            "--json cannot be combined with --hosts, because Ray changes the output of the workers. Leave "
            "--json out; `onnxtrain inspect RUN --json` prints the record of the run."
        )
    before = _saved_epochs(directory) if resumed_directory(options) is not None else None
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
    # The error of the failed worker comes before the WorkersErrors that it caused in others.
    failures.sort(key=lambda error: isinstance(error, WorkersError))
    if failures:
        raise failures[0]
    if INTERRUPTED in ends:
        sys.exit(INTERRUPTED)


def work(
    options: TrainOptions, given: frozenset[str], directory: Path, epochs_before: int
) -> OnnxTrainError | int:
    """Runs the command in a worker process. After a restart, it resumes the run if a checkpoint has been saved.

    Args:
        options: options of the command.
        given: names of the options that were given.
        directory: directory of the run.
        epochs_before: number of epochs that the run had finished before the command.

    Returns:
        The exit code, or an error that restarting the workers cannot fix.

    Raises:
        WorkersError: another worker has ended.
    """
    # Ctrl-C in a terminal reaches all processes of the group. Workers leave the group, because the launcher forwards
    # Ctrl-C to them.
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    strategy = chosen_strategy(options.workers)
    assert strategy is not None
    finished = False
    # Worker 0 decides for all workers: it may save before another worker looks at the directory.
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        group = join_group(strategy)
        saved = group.share(_saved_epochs(directory) if group.rank == 0 else None)
        if saved is None:
            options = replace(options, overwrite=True)
        else:
            options = replace(options, source=directory, output=None, overwrite=False)
            finished = not saved.unfinished and saved.epochs > epochs_before
    try:
        # Errors are created in this process, so the wording of the shell has to be set here, too.
        with quiet_unless_leading(), speaking(ShellWords()):
            train(options, given, finished=finished)
    except WorkersError:
        # Another worker has ended, so restarting all of them may help.
        raise
    except OnnxTrainError as error:
        return error
    except SystemExit as end:
        # PyTorch's agent, which has forwarded Ctrl-C, waits for the process to exit and no longer reads its result.
        if end.code == INTERRUPTED and "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
            raise
        return int(end.code or 0)
    return 0


def _saved_epochs(directory: Path) -> _Saved | None:
    """Reads a run's progress from the checkpoint in its directory; returns None if the run cannot be resumed."""
    try:
        properties = saved_properties(directory)
    except (OnnxTrainError, OSError):
        return None
    # A run without options was killed before it began to train.
    position = None
    if properties is not None and OPTIONS in properties and properties[OPTIONS] != BEGUN:
        position = saved_position(properties, directory)
    return None if position is None else _Saved(position.epoch, position.unfinished)
