"""Share the cores between PyTorch's threads and those of ONNX Runtime.

Both keep a pool of threads, one per core. Threads of PyTorch that wait for work keep ONNX Runtime's threads from the
cores. :func:`threads_for` chooses the number of a session's threads, :func:`share_cores` sends PyTorch's away.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import onnx_ir as ir
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from onnxtrain.emitter import static_dims
from onnxtrain.op_facts import PRODUCTS

_T = TypeVar("_T")

# Environment variables by which the user says how long idle threads of GNU OpenMP wait for work.
_SET_BY_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# `omp_pause_soft` of the OpenMP standard: threads end, settings such as the number of threads stay.
_SOFT = 1
_TIMED_RUNS = 4
_LONG_RUN = 1e-3
"""Seconds of a run above which ONNX Runtime gains more from idle cores than from cores that PyTorch keeps awake."""

_LITTLE_WORK = 1 << 20
"""Multiplications, or elements read and written, that one thread does in the time that others take to wake up."""
_PRODUCTS = PRODUCTS | {"MatrixProduct"}
# Ops whose work does not follow from the sizes of their inputs and outputs alone.
_LONG_OPS = re.compile(
    r"Attention|Conv|Einsum|GRU|Gemm|If|LSTM|Loop|MatMul|RNN|Scan|DFT|Det|Inverse|Resize|TopK"
)


def threads_for(model: ir.Model) -> int:
    """Chooses the number of threads for a graph: one if it has next to nothing to compute, else PyTorch's number."""
    # PyTorch decides per op. ONNX Runtime hands out work as soon as there is some for two threads, and its threads rest
    # between two runs, so that waking them up takes longer than a small run.
    return 1 if sum(map(_work, model.graph)) < _LITTLE_WORK else torch.get_num_threads()


def _work(node: ir.Node) -> float:
    """Estimates the multiplications of a matrix product, or the elements that another node reads and writes.

    Returns infinity if the sizes are symbolic or the op is in `_LONG_OPS`.
    """
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    sizes = [_elements(value) for value in values]
    name = node.op_type.removesuffix("_float")
    # [m, k] times [k, n]: m·k·n is the square root of (m·k)·(k·n)·(m·n).
    if name in _PRODUCTS:
        return math.sqrt(sizes[0] * sizes[1] * sizes[-1])
    return math.inf if _LONG_OPS.search(name) else sum(sizes)


def _elements(value: ir.Value) -> float:
    """Returns the number of elements of a value, infinity if a size is symbolic."""
    dims = static_dims(value)
    return math.inf if dims is None or None in dims else math.prod(size for size in dims if size is not None)


class CoreSharing:
    """Times the first runs of a session, and calls :func:`share_cores` if they are long.

    Args:
        device: the device of the session.
        clock: returns the time in seconds.

    Attributes:
        is_settled: True if no run needs to be timed any more.
    """

    # Short runs gain more from cores that PyTorch's threads keep awake: a core at rest takes some ten microseconds to
    # wake up, more in a virtual machine.

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        # A GPU's work takes no cores.
        self.is_settled = device.type != "cpu"
        self._times: list[float] = []

    def watch(self, run: Callable[[], _T]) -> _T:
        """Times a run, and returns its result."""
        start = self._clock()
        result = run()
        self._times.append(self._clock() - start)
        if len(self._times) == _TIMED_RUNS:
            self.is_settled = True
            # The shortest: the first run allocates memory, and others may have been interrupted.
            if min(self._times) > _LONG_RUN:
                share_cores()
        return result


@functools.cache
def share_cores() -> None:
    """Ends PyTorch's threads after each step of an optimizer, so that ONNX Runtime's threads find the cores free.

    Does nothing if PyTorch has one thread or another OpenMP than GNU's, or if the environment says how long to wait.
    """
    # Threads of GNU OpenMP look for work for some milliseconds after an op before they rest, and only environment
    # variables, read when the program starts, change that. PyTorch's next op starts new threads in a tenth of a
    # millisecond.
    if torch.get_num_threads() == 1 or any(name in os.environ for name in _SET_BY_USER):
        return
    pause = _pause()
    if pause is not None:

        def end_threads(*_: object) -> None:
            pause(_SOFT)

        register_optimizer_step_post_hook(end_threads)


def _pause(maps: Path = Path("/proc/self/maps")) -> Callable[[int], int] | None:
    """Returns the function `omp_pause_resource_all` of the GNU OpenMP that PyTorch uses; None if it uses another one.

    Args:
        maps: Linux's list of the files that are mapped into the memory of this process.
    """
    lines = maps.read_text().splitlines() if maps.exists() else []
    loaded = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}
    # Other packages, e.g. scikit-learn, may have loaded a libgomp of their own.
    libraries = {path for path in loaded if path.startswith(str(Path(torch.__file__).parent))} or loaded
    if len(libraries) != 1:
        return None
    pause: Callable[[int], int] | None = getattr(ctypes.CDLL(libraries.pop()), "omp_pause_resource_all", None)
    return pause
