"""Share the cores between PyTorch's threads and those of ONNX Runtime.

Both keep a pool of threads, one per core. Threads of PyTorch that wait for work keep ONNX Runtime's threads from the
cores. :func:`threads_for` chooses the number of a session's threads, :func:`choose_step_threads` that of an optimizer's
step, and :func:`share_cores` sends PyTorch's away.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import onnx_ir as ir
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from onnxtrain.emitter import static_dims
from onnxtrain.op_facts import PRODUCTS

_T = TypeVar("_T")

# Environment variables by which the user says how long idle threads of GNU OpenMP wait for work.
_SET_BY_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# `omp_pause_soft` of the OpenMP standard: threads end, settings such as the number of threads stay.
_SOFT = 1
# An optimizer's step on one thread takes less time for fewer elements than so many if threads must be started, and so
# many for each tensor (AdamW, two threads: starting takes 0.1 ms, sharing a tensor 3 us, an element 0.4 ns).
_ELEMENTS_PER_START = 1 << 19
_ELEMENTS_PER_TENSOR = 1 << 14
# Optimizers that read and write each element a few times. Others, such as Muon, multiply matrices in a step.
_ELEMENTWISE = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
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
    """Times the first runs of a session; calls :func:`choose_step_threads`, and :func:`share_cores` if runs are long.

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
            choose_step_threads()
            # The shortest: the first run allocates memory, and others may have been interrupted.
            if min(self._times) > _LONG_RUN:
                share_cores()
        return result


def share_cores() -> None:
    """Ends PyTorch's threads after each step of an optimizer, so that ONNX Runtime's threads find the cores free."""
    # Threads of GNU OpenMP look for work for some milliseconds after an op before they rest, and only environment
    # variables, read when the program starts, change that. PyTorch's next op starts new threads in a tenth of a
    # millisecond.
    threads = choose_step_threads()
    if threads is not None:
        threads.ends_threads = True


@functools.cache
def choose_step_threads() -> _StepThreads | None:
    """Lets short steps of optimizers run on one thread, from now on.

    Returns:
        The hooks of all optimizers. None, and does nothing, if PyTorch has one thread or another OpenMP than GNU's, or
        if the environment says how long threads wait.
    """
    if torch.get_num_threads() == 1 or any(name in os.environ for name in _SET_BY_USER):
        return None
    openmp = _openmp()
    if openmp is None:
        return None
    threads = _StepThreads(openmp)
    register_optimizer_step_pre_hook(threads.before_step)
    register_optimizer_step_post_hook(threads.after_step)
    return threads


class _StepThreads:
    """Hooks of all optimizers: choose the threads of a step, and may end PyTorch's threads when the step is done.

    Args:
        openmp: the GNU OpenMP that PyTorch uses.

    Attributes:
        ends_threads: True if PyTorch's threads end with each step.
    """

    def __init__(self, openmp: ctypes.CDLL) -> None:
        self.ends_threads = False
        self._openmp = openmp
        # OpenMP's number of threads is one of the thread that sets it.
        self._of_thread = threading.local()
        self._elements: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]]
        self._elements = weakref.WeakKeyDictionary()

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Leaves a short step one thread."""
        # A closure computes the model's gradients in the step.
        if (
            len(args) > 1
            or kwargs
            or not isinstance(optimizer, _ELEMENTWISE)
            or not self._is_short(optimizer)
        ):
            return
        # It is set already if an earlier step has raised.
        if getattr(self._of_thread, "threads", None) is None:
            self._of_thread.threads = torch.get_num_threads()
        self._openmp.omp_set_num_threads(1)

    def after_step(self, *_: object) -> None:
        """Gives PyTorch back its number of threads, and ends those that it has started if that is asked for."""
        threads = getattr(self._of_thread, "threads", None)
        if threads is not None:
            self._openmp.omp_set_num_threads(threads)
            self._of_thread.threads = None
        if self.ends_threads:
            self._openmp.omp_pause_resource_all(_SOFT)

    def _is_short(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if one thread takes a step in less time than several, which share each tensor."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known_count, elements = self._elements.get(optimizer, (-1, 0))
        if known_count != count:
            elements = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
            self._elements[optimizer] = count, elements
        start = _ELEMENTS_PER_START if self.ends_threads else 0
        return elements < start + _ELEMENTS_PER_TENSOR * count


def _openmp(maps: Path = Path("/proc/self/maps")) -> ctypes.CDLL | None:
    """Returns the GNU OpenMP that PyTorch uses; None if it uses another one, or one without `omp_pause_resource_all`.

    Args:
        maps: Linux's list of the files that are mapped into the memory of this process.
    """
    lines = maps.read_text().splitlines() if maps.exists() else []
    loaded = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}
    # Other packages, e.g. scikit-learn, may have loaded a libgomp of their own.
    libraries = {path for path in loaded if path.startswith(str(Path(torch.__file__).parent))} or loaded
    if len(libraries) != 1:
        return None
    openmp = ctypes.CDLL(libraries.pop())
    return openmp if hasattr(openmp, "omp_pause_resource_all") else None
