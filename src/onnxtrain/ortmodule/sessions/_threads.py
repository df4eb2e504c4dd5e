"""Shares the cores between the threads of PyTorch and of ONNX Runtime.

Both have a thread pool with one thread per core. While idle PyTorch threads spin, ONNX Runtime's threads don't get the
cores. :func:`threads_for` chooses the number of threads of a session, :func:`choose_step_threads` the number of threads
of an optimizer step, and :func:`share_cores` makes PyTorch's threads shut down after each optimizer step.
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

# Environment variables that set how long idle threads of GNU OpenMP spin. If the user has set one, nothing is changed.
_SET_BY_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# `omp_pause_soft` of the OpenMP standard: ends threads and keeps settings such as the number of threads.
_SOFT = 1
# A single thread is faster for an optimizer step with fewer elements than _ELEMENTS_PER_TENSOR for each tensor, plus
# _ELEMENTS_PER_START if threads must be started (AdamW, two threads: a start takes 0.1 ms, sharing a tensor 3 us, an
# element 0.4 ns).
_ELEMENTS_PER_START = 1 << 19
_ELEMENTS_PER_TENSOR = 1 << 14
# Optimizers that read and write each element a few times. Other optimizers do more work, e.g. Muon multiplies matrices.
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
"""Duration of a run, in seconds, above which ONNX Runtime gains more from free cores than from cores kept awake by
PyTorch."""

_LITTLE_WORK = 1 << 20
"""Number of multiplications, or of elements read and written, that one thread does while other threads wake up."""
_PRODUCTS = PRODUCTS | {"Linear", "LinearRelu", "MatrixProduct"}
# Ops whose work doesn't follow from the sizes of their inputs and outputs.
_LONG_OPS = re.compile(
    r"Attention|Conv|Einsum|GRU|Gemm|If|LSTM|Loop|MatMul|RNN|Scan|DFT|Det|Inverse|Resize|TopK"
)


def threads_for(model: ir.Model) -> int:
    """Returns the number of threads for a session: 1 for a graph with little work, else PyTorch's number of threads."""
    # PyTorch decides per op. ONNX Runtime uses several threads as soon as there is work for two, and its threads sleep
    # between runs, so that waking them takes longer than a small run.
    return 1 if sum(map(_estimated_work, model.graph)) < _LITTLE_WORK else torch.get_num_threads()


def _estimated_work(node: ir.Node) -> float:
    """Estimates the work of a node.

    Returns:
        The number of multiplications of a matrix product, or the number of elements that any other node reads and
        writes. Infinity if a size is symbolic or the op matches `_LONG_OPS`.
    """
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    sizes = [_elements(value) for value in values]
    name = node.op_type.removesuffix("_float")
    # For [m, k] times [k, n], m·k·n is the square root of (m·k)·(k·n)·(m·n).
    if name in _PRODUCTS:
        return math.sqrt(sizes[0] * sizes[1] * sizes[-1])
    return math.inf if _LONG_OPS.search(name) else sum(sizes)


def _elements(value: ir.Value) -> float:
    """Returns the number of elements of a value, or infinity if a size is symbolic."""
    dims = static_dims(value)
    return math.inf if dims is None or None in dims else math.prod(size for size in dims if size is not None)


class CoreSharing:
    """Chooses how PyTorch and ONNX Runtime share the CPU's cores, from the durations of a session's first runs.

    After these runs, it calls `choose_step_threads` and, if even the shortest run was long, `share_cores`.

    Args:
        device: the device of the session.
        clock: returns the time in seconds.

    Attributes:
        is_settled: True if no further run needs to be timed; always True for a GPU.
    """

    # Short runs gain more from cores that PyTorch's spinning threads keep awake: an idle core takes some ten
    # microseconds to wake up, longer in a virtual machine.

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        # Work on a GPU needs no cores.
        self.is_settled = device.type != "cpu"
        self._times: list[float] = []

    def watch(self, run: Callable[[], _T]) -> _T:
        """Calls `run` and times it; returns its result."""
        start = self._clock()
        result = run()
        self._times.append(self._clock() - start)
        if len(self._times) == _TIMED_RUNS:
            self.is_settled = True
            choose_step_threads()
            # The shortest time counts: the first run allocates memory, and others may have been interrupted.
            if min(self._times) > _LONG_RUN:
                share_cores()
        return result


def share_cores() -> None:
    """Makes PyTorch's threads shut down after each optimizer step, which frees the cores for ONNX Runtime's threads.

    Does nothing if `choose_step_threads` registers no hooks.
    """
    # Threads of GNU OpenMP spin for some milliseconds after an op. Only environment variables, read at program start,
    # change this duration. PyTorch's next op starts new threads in 0.1 ms.
    threads = choose_step_threads()
    if threads is not None:
        threads.ends_threads = True


@functools.cache
def choose_step_threads() -> _StepThreads | None:
    """Registers global optimizer hooks that run short optimizer steps on one thread.

    Returns:
        The hooks. None if no hooks are registered, because PyTorch uses one thread or an OpenMP other than GNU's, or a
        variable in `_SET_BY_USER` is set.
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
    """Optimizer hooks that run short steps on one thread, and can shut down PyTorch's threads after each step.

    Args:
        openmp: the GNU OpenMP library that PyTorch uses.

    Attributes:
        ends_threads: True to shut down PyTorch's OpenMP threads after each step.
    """

    def __init__(self, openmp: ctypes.CDLL) -> None:
        self.ends_threads = False
        self._openmp = openmp
        # OpenMP's number of threads is a setting per thread.
        self._of_thread = threading.local()
        self._elements: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]]
        self._elements = weakref.WeakKeyDictionary()

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Sets the number of threads to 1 before a short step of an elementwise optimizer, e.g. Adam.

        A step that is called with a closure is never short, because the closure computes gradients.
        """
        # With a closure, the step computes the model's gradients, too.
        if (
            len(args) > 1
            or kwargs
            or not isinstance(optimizer, _ELEMENTWISE)
            or not self._is_short(optimizer)
        ):
            return
        # The number is already stored if an earlier step has raised.
        if getattr(self._of_thread, "threads", None) is None:
            self._of_thread.threads = torch.get_num_threads()
        self._openmp.omp_set_num_threads(1)

    def after_step(self, *_: object) -> None:
        """Restores PyTorch's number of threads, and shuts down its threads if `ends_threads` is set."""
        threads = getattr(self._of_thread, "threads", None)
        if threads is not None:
            self._openmp.omp_set_num_threads(threads)
            self._of_thread.threads = None
        if self.ends_threads:
            self._openmp.omp_pause_resource_all(_SOFT)

    def _is_short(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if a step is faster on one thread than on several threads that split the work on each tensor."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known_count, elements = self._elements.get(optimizer, (-1, 0))
        if known_count != count:
            elements = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
            self._elements[optimizer] = count, elements
        start = _ELEMENTS_PER_START if self.ends_threads else 0
        return elements < start + _ELEMENTS_PER_TENSOR * count


def _openmp(maps: Path = Path("/proc/self/maps")) -> ctypes.CDLL | None:
    """Returns the GNU OpenMP library that PyTorch uses.

    Args:
        maps: Linux's list of files that are mapped into the memory of this process.

    Returns:
        The library. None if PyTorch uses a different OpenMP, the library is ambiguous, or it lacks
        `omp_pause_resource_all`.
    """
    lines = maps.read_text().splitlines() if maps.exists() else []
    loaded = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}
    # Other packages, e.g. scikit-learn, may have loaded their own libgomp.
    libraries = {path for path in loaded if path.startswith(str(Path(torch.__file__).parent))} or loaded
    if len(libraries) != 1:
        return None
    openmp = ctypes.CDLL(libraries.pop())
    return openmp if hasattr(openmp, "omp_pause_resource_all") else None
