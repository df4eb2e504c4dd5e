"""Engines in processes of their own, which take turns. They answer one JSON request a line.

Programs of the other folders put this folder on their path.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Worker", "add_options", "earlier_results", "gflops", "gflops_on", "serve", "times_of"]

# Without these, glibc returns large blocks to the system, and each call of PyTorch waits for new pages.
_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 26)}


class Worker:
    """An engine in a process of its own.

    Args:
        program: path of the Python program, which calls `serve`.
        arguments: its command line.
        threads: number of threads for the libraries that read it from the environment.
        environment: more variables.
    """

    def __init__(
        self, program: str, arguments: list[str], threads: int, environment: Mapping[str, str] | None = None
    ) -> None:
        variables = {
            name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        }
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  # lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=os.environ | _MEMORY | variables | dict(environment or {}),
        )

    def ask(self, **request: Any) -> Any:
        """Returns the answer to a request.

        Raises:
            RuntimeError: the process ended; the message is the end of what it wrote.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._stderr.seek(0)
            raise RuntimeError(f"{request}: {self._stderr.read()[-2000:]}")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()
        self._stderr.close()


def serve(answer: Callable[..., Any]) -> None:
    """Answers requests until there are no more. Whatever else is printed goes to stderr."""
    replies, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=replies, flush=True)


def times_of(call: Callable[[], Any], seconds: float) -> list[float]:
    """Returns the microseconds of each call in a turn, without garbage collection; at least three."""
    times: list[float] = []
    gc.disable()
    call()
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    gc.enable()
    return times


def gflops() -> float:
    """Returns the GFLOP/s of NumPy's float32 product of 1024 x 1024 matrices, on as many threads as its library has."""
    import numpy as np

    a = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)
    return round(2 * 1024**3 / min(times_of(lambda: a @ a, 0.5)) / 1e3, 1)


def gflops_on(program: str, threads: int) -> float:
    """Returns `gflops` in a process with a number of threads; `program` serves it for `--work gflops`."""
    worker = Worker(program, ["--work", "gflops", "", str(threads)], threads)
    speed = float(worker.ask())
    worker.close()
    return speed


def add_options(parser: argparse.ArgumentParser, results: Path) -> None:
    """Adds the options of a program that measures in turns.

    Args:
        parser: the program's parser.
        results: default of `--results`.
    """
    parser.add_argument("--threads", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1, help="of a turn")
    parser.add_argument("--values", action="store_true", help="compare values only; writes no results")
    parser.add_argument("--profile", action="store_true", help="print the time of each node")
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--write", action="store_true", help="put the tables into notes/performance.md")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)


def earlier_results(path: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the results in a file if they are of the machine that `about` describes, else empty results."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found if found.get("machine") == about else {"machine": about, "gflops": {}, "threads": {}}
