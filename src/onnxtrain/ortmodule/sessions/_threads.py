"""PyTorch's threads beside those of ONNX Runtime."""

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

_SET_BY_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_SOFT = 1
"""`omp_pause_soft`: what has been set stays."""
_TIMED = 4
_LONG = 1e-3
"""Seconds of a run from which on a core of one's own is worth more than one that is awake."""


_LITTLE = 1 << 20
"""Multiplications, or elements read and written, for which one thread takes no longer than others to wake."""
_PRODUCTS = PRODUCTS | {"MatrixProduct"}
_LONG_OPS = re.compile(
    r"Attention|Conv|Einsum|GRU|Gemm|If|LSTM|Loop|MatMul|RNN|Scan|DFT|Det|Inverse|Resize|TopK"
)


def threads_for(model: ir.Model) -> int:
    """Returns how many threads a graph is worth: PyTorch's number, or one where there is next to nothing to do.

    PyTorch decides so for each op. ONNX Runtime hands work out as soon as there is some for two threads, and the others
    rest between two runs. Graphs with symbolic sizes get all threads.
    """
    return 1 if sum(map(_work, model.graph)) < _LITTLE else torch.get_num_threads()


def _work(node: ir.Node) -> float:
    """How many numbers a node multiplies, or reads and writes; infinite where that is not known."""
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    sizes = [_elements(value) for value in values]
    name = node.op_type.removesuffix("_float")
    if name in _PRODUCTS:  # [m, k] times [k, n]: m·k·n is the root of (m·k)·(k·n)·(m·n)
        return math.sqrt(sizes[0] * sizes[1] * sizes[-1])
    return math.inf if _LONG_OPS.search(name) else sum(sizes)


def _elements(value: ir.Value) -> float:
    dims = static_dims(value)
    return math.inf if dims is None or None in dims else math.prod(size for size in dims if size is not None)


class CoreSharing:
    """Watches the first runs of a session, and has PyTorch's threads leave the cores if they take long.

    Short runs gain more from a core that PyTorch's threads keep awake: a processor at rest takes some ten microseconds
    to wake, more in a virtual machine.

    Args:
        device: where the session computes; on others than the CPU there is nothing to share.
        clock: seconds.

    Attributes:
        is_settled: whether runs need not be watched any more.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.is_settled = device.type != "cpu"
        self._times: list[float] = []

    def watch(self, run: Callable[[], _T]) -> _T:
        """Returns the result of a run."""
        start = self._clock()
        result = run()
        self._times.append(self._clock() - start)
        if len(self._times) == _TIMED:
            self.is_settled = True
            if min(self._times) > _LONG:
                share_cores()
        return result


@functools.cache
def share_cores() -> None:
    """Makes PyTorch's threads end with each step of an optimizer, so that ONNX Runtime's find the cores free.

    Those of GNU OpenMP look for more work for some milliseconds after an op before they rest, and there is no telling
    them otherwise while the program runs. PyTorch's next op starts new ones, in a tenth of a millisecond. Nothing is
    done where PyTorch has one thread or another OpenMP, or the environment says how long to wait.
    """
    if torch.get_num_threads() == 1 or any(name in os.environ for name in _SET_BY_USER):
        return
    pause = _pause()
    if pause is not None:

        def end_threads(*_: object) -> None:
            pause(_SOFT)

        register_optimizer_step_post_hook(end_threads)


def _pause(maps: Path = Path("/proc/self/maps")) -> Callable[[int], int] | None:
    """Returns GNU OpenMP's `omp_pause_resource_all`, if that is what PyTorch computes with.

    Args:
        maps: file with a line for each part of the memory of this process, the file that it shows at the end.
    """
    lines = maps.read_text().splitlines() if maps.exists() else []
    loaded = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}
    # Other packages may have brought one of their own.
    libraries = {path for path in loaded if path.startswith(str(Path(torch.__file__).parent))} or loaded
    if len(libraries) != 1:
        return None
    pause: Callable[[int], int] | None = getattr(ctypes.CDLL(libraries.pop()), "omp_pause_resource_all", None)
    return pause
