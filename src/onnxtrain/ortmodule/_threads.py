"""PyTorch's threads beside those of ONNX Runtime."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["CoreSharing", "share_cores"]

_T = TypeVar("_T")

_SET_BY_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_ELEMENTS_PER_THREAD = 1 << 15
"""What PyTorch gives a thread at least."""
_TIMED = 4
_LONG = 1e-3
"""Seconds of a run from which on a core of one's own is worth more than one that is awake."""


class CoreSharing:
    """Watches the first runs of a session, and has PyTorch's threads leave the cores if they take long.

    Short runs gain more from a core that PyTorch's threads keep awake: a processor at rest takes some ten microseconds
    to wake, more in a virtual machine.

    Attributes:
        is_settled: whether runs need not be watched any more.
    """

    def __init__(self) -> None:
        self.is_settled = False
        self._times: list[float] = []

    def watch(self, run: Callable[[], _T]) -> _T:
        """Returns the result of a run."""
        start = time.perf_counter()
        result = run()
        self._times.append(time.perf_counter() - start)
        if len(self._times) == _TIMED:
            self.is_settled = True
            if min(self._times) > _LONG:
                share_cores()
        return result


@functools.cache
def share_cores() -> None:
    """Makes PyTorch's threads rest soon after an op, so that ONNX Runtime's find the cores free.

    Those of GNU OpenMP look for more work for 300,000 turns by default, which are milliseconds, but for 100 when there
    are more OpenMP threads than cores (libgomp's manual, `GOMP_SPINCOUNT`). It cannot know of ONNX Runtime's, so it
    gets a second team, which is made once and has nothing to do. Nothing is done where there is one thread, or the
    environment says how long to wait.
    """
    threads = torch.get_num_threads()
    if sys.platform != "linux" or threads == 1 or any(name in os.environ for name in _SET_BY_USER):
        return
    made = threading.Event()

    def have_a_team() -> None:
        torch.zeros(_ELEMENTS_PER_THREAD * threads)
        made.set()
        threading.Event().wait()  # a team goes with the thread that made it

    threading.Thread(target=have_a_team, name="onnxtrain-openmp-team", daemon=True).start()
    made.wait()
