"""What the engines have in common: they time a step whenever the driver asks for it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LOSSES = 5
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Engine:
    """One training step in two halves.

    Attributes:
        gradients: forward and backward; returns the loss.
        update: the optimizer's step at a learning rate.
        versions: of the packages it runs on.
    """

    gradients: Callable[[], float]
    update: Callable[[float], None]
    versions: dict[str, str]


def serve(make: Callable[[str, Path, int], Engine]) -> None:
    """Runs an engine as a process: first the losses of a few steps, then one timing per line of input.

    Arguments of the process: net, directory with its artifacts, threads. A line of input is the number of
    steps to time; answers are JSON, one line each.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("net")
    parser.add_argument("artifacts", type=Path)
    parser.add_argument("threads", type=int)
    arguments = parser.parse_args()
    engine = make(arguments.net, arguments.artifacts, arguments.threads)
    losses = []
    for _ in range(LOSSES):
        losses.append(float(engine.gradients()))
        engine.update(LEARNING_RATE)
    # Timed at rate 0: a net that has learned its one batch by heart has gradients so small that their squares
    # are denormal numbers, which take a CPU far longer.
    _answer({"losses": losses, "versions": engine.versions})
    for line in sys.stdin:
        halves: dict[str, list[float]] = {"gradients_ms": [], "update_ms": []}
        for _ in range(int(line)):
            halves["gradients_ms"].append(_milliseconds(engine.gradients, arguments.threads))
            halves["update_ms"].append(_milliseconds(lambda: engine.update(0.0), arguments.threads))
        _answer(halves)


def _milliseconds(call: Callable[[], object], threads: int) -> float:
    """CPU time for one thread, which other processes hardly disturb; else elapsed time."""
    clock = time.process_time_ns if threads == 1 else time.perf_counter_ns
    start = clock()
    call()
    return (clock() - start) / 1e6


def _answer(message: object) -> None:
    print(json.dumps(message), flush=True)
