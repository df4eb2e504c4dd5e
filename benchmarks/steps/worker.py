"""A process with one engine: answers one JSON line for its first steps, then one for each line of input.

Usage: python -m steps.worker ENGINE_MODULE CASE FILES THREADS [KEY=VALUE ...]
A line of input is the number of steps to time.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import TextIO

from steps.engines._engine import Engine, Job
from steps.machine import memory_mb

LOSSES = 4


def main() -> None:
    module, case, files, threads, *options = sys.argv[1:]
    answers = _only_answers_on_stdout()
    _use_cores(int(threads))
    warnings.simplefilter("ignore")
    job = Job(case, Path(files), int(threads), dict(option.split("=", 1) for option in options))
    start = importlib.import_module(f"steps.engines.{module}").make(job)
    rate = float(json.loads((job.files / "about.json").read_text())["rate"])
    base = memory_mb("VmRSS")
    began = time.perf_counter()
    engine = start()
    losses = [_step(engine, rate)]
    first = time.perf_counter() - began
    losses += [_step(engine, rate) for _ in range(LOSSES - 1)]
    _answer(
        answers,
        {
            "losses": losses,
            "first_step_s": round(first, 4),
            "base_mb": base,
            "peak_mb": memory_mb(),
            "versions": engine.versions | {"python": sys.version.split()[0]},
        },
    )
    for line in sys.stdin:
        # Timed at rate 0: a net that has learned its one batch by heart has gradients so small that their squares
        # are denormal numbers, which take a CPU far longer.
        times = [_times(engine) for _ in range(int(line))]
        _answer(
            answers,
            {
                "gradients_ms": [t[0] for t in times],
                "update_ms": [t[1] for t in times],
                "peak_mb": memory_mb(),
            },
        )


def _step(engine: Engine, rate: float) -> float:
    loss = engine.gradients()
    engine.update(rate)
    return engine.gradients() if engine.whole else loss


def _times(engine: Engine) -> tuple[float, float]:
    began = time.perf_counter_ns()
    if not engine.whole:
        engine.gradients()
    between = time.perf_counter_ns()
    engine.update(0.0)
    return (between - began) / 1e6, (time.perf_counter_ns() - between) / 1e6


def _use_cores(threads: int) -> None:
    """Leaves the process so many cores, for engines that take all there are."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def _only_answers_on_stdout() -> TextIO:
    """Returns where answers go; whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _answer(answers: TextIO, message: object) -> None:
    print(json.dumps(message), file=answers, flush=True)


if __name__ == "__main__":
    main()
