"""Counts memory and work of a training step as sizes grow, in ONNX Runtime and in eager PyTorch, without a clock.

Memory is the peak of all allocations, work the number of elements that are read and written, plus the multiplications
of products. Ours come from ONNX Runtime's profile of each node that ran, also in bodies of loops; eager PyTorch's from
the operators that it dispatches.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import onnxruntime
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from onnxtrain.ortmodule.capture.dynamo.patches._missing_fakes import missing_fakes
from onnxtrain.ortmodule.module._engine import onnxruntime_backend
from onnxtrain.runtime.session_settings import SessionSettings

Program = Callable[..., Any]


@dataclass(frozen=True)
class Cost:
    """Peak memory of a step in bytes, and its work in elements and multiplications."""

    memory: float
    work: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.memory + other.memory, self.work + other.work)


@dataclass(frozen=True)
class Growth:
    """The exponents of memory and work in a size: 1 is linear, 2 quadratic."""

    memory: float
    work: float

    @classmethod
    def of(cls, costs: Sequence[Cost]) -> Growth:
        """Returns the exponents, given the costs at sizes n, 2n and 4n."""
        return cls(*(_exponent([getattr(cost, what) for cost in costs]) for what in ("memory", "work")))

    @classmethod
    def between(cls, first: Cost, last: Cost) -> Growth:
        """Returns the exponents of costs a n^p, given the costs at sizes n and 4n."""
        return cls(*(_power(getattr(first, what), getattr(last, what)) for what in ("memory", "work")))


def _power(first: float, last: float) -> float:
    """Returns the exponent p of costs a n^p at n and 4n."""
    return math.log2(last / first) / 2 if 0 < first < last else 0.0


def _exponent(costs: Sequence[float]) -> float:
    """Returns the exponent p, given costs at n, 2n and 4n.

    It is the smaller of two estimates: costs of a n^p + b (a cost b that does not grow makes no difference), and costs
    of a n^p (a change of algorithm between two sizes makes little difference).
    """
    first, second = costs[1] - costs[0], costs[2] - costs[1]
    if first <= 0 or second <= 0:
        return 0.0
    return max(0.0, min(math.log2(second / first), _power(costs[0], costs[2])))


def ours(program: Program, arguments: Sequence[Any], dynamic: bool = False) -> Cost:
    """Returns the cost of a step of a program, compiled for ONNX Runtime.

    Args:
        program: the function.
        arguments: its arguments, which it may change in place.
        dynamic: whether all sizes are symbols.
    """
    torch._dynamo.reset()
    compiled = torch.compile(program, backend=onnxruntime_backend(fallback=False), fullgraph=True)
    if dynamic:
        for tensor in _tensors(arguments):
            for axis in range(tensor.dim()):
                torch._dynamo.maybe_mark_dynamic(tensor, axis)
    sizes = torch.fx.experimental._config.patch(use_duck_shape=False)
    settings = torch._dynamo.config.patch(allow_rnn=True, capture_dynamic_output_shape_ops=True)
    given = _given(arguments)
    with profiled() as cost, sizes, settings, missing_fakes():
        _step(compiled, arguments)
    return given + cost()


def eager(program: Program, arguments: Sequence[Any]) -> Cost:
    """Returns the cost of a step of a program in eager PyTorch; takes the arguments of :func:`ours`."""
    given = _given(arguments)
    with _Dispatched(arguments) as dispatched:
        _step(program, arguments)
    return given + Cost(dispatched.peak, dispatched.work)


def _given(arguments: Sequence[Any]) -> Cost:
    """Returns the cost of the arguments, of which any program may make a copy."""
    tensors = _tensors(arguments)
    return Cost(sum(tensor.nbytes for tensor in tensors), sum(tensor.numel() for tensor in tensors))


def _step(program: Program, arguments: Sequence[Any]) -> None:
    """Runs a program and the gradients of its outputs."""
    torch.manual_seed(0)
    leaves = [tensor for tensor in _tensors(arguments) if tensor.requires_grad]
    scored = [out for out in _tensors(program(*arguments)) if out.requires_grad]
    if scored and leaves:
        torch.autograd.grad(scored, leaves, [torch.ones_like(out) for out in scored], allow_unused=True)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


_INDEXED = ("index", "gather", "take", "embedding", "index_select", "slice", "select")
"""PyTorch's operators that read some elements of their first argument; views among them read none."""


class _Dispatched(TorchDispatchMode):
    """Counts the work of the operators that eager PyTorch dispatches, and the bytes of their results that are alive."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        super().__init__()
        self.work = 0.0
        self.peak = 0
        self._given = {tensor.untyped_storage().data_ptr() for tensor in _tensors(arguments)}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        storages = [tensor.untyped_storage() for tensor in outputs]
        self._alive |= {
            storage.data_ptr(): (StorageWeakRef(storage), storage.nbytes())
            for storage in storages
            if storage.data_ptr() not in self._given
        }
        self._alive = {at: pair for at, pair in self._alive.items() if not pair[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        if not func.is_view:
            read = inputs[1:] if name in _INDEXED else inputs
            self.work += sum(tensor.numel() for tensor in (*read, *outputs))
        if func._overloadpacket in flop_registry:
            count = flop_registry[func._overloadpacket]
            self.work += count(*args, **(kwargs or {}), out_val=result) / 2
        elif inputs and any(part in name for part in ("linalg", "cholesky", "triangular", "lu_")):
            self.work += max(t.numel() * t.shape[-1] for t in inputs if t.dim()) if inputs[0].dim() else 0
        elif "dot_product" in name:
            self.work += inputs[0].numel() * inputs[1].shape[-2]
        elif name.startswith(("avg_pool", "max_pool")):
            window = args[2] if "backward" in name else args[1]
            self.work += max(tensor.numel() for tensor in outputs) * math.prod(window)
        elif name.lstrip("_").startswith(("cdist", "pdist")):
            self.work += outputs[0].numel() * inputs[0].shape[-1]
        return result


@contextlib.contextmanager
def profiled() -> Iterator[Callable[[], Cost]]:
    """Has ONNX Runtime write a profile of each session that is opened in the block; yields what sums them up."""
    opened: list[onnxruntime.InferenceSession] = []
    options_of, open_session = SessionSettings.options, onnxruntime.InferenceSession

    def options(self: SessionSettings) -> onnxruntime.SessionOptions:
        result = options_of(self)
        result.enable_profiling = True
        result.profile_file_prefix = os.path.join(folder, f"profile-{len(opened)}")
        return result

    def opens(*arguments: Any, **named: Any) -> onnxruntime.InferenceSession:
        opened.append(open_session(*arguments, **named))
        return opened[-1]

    def total() -> Cost:
        return sum(costs, Cost(0, 0))

    costs: list[Cost] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(SessionSettings, "options", options),
        mock.patch.object(onnxruntime, "InferenceSession", opens),
    ):
        yield total
        costs += map(cost_of_session, opened)


def cost_of_session(session: onnxruntime.InferenceSession) -> Cost:
    """Returns the cost of all runs of a session that writes a profile, and ends the profile."""
    with open(session.end_profiling(), encoding="utf-8") as file:
        profile = json.load(file)
    nodes = [event["args"] for event in profile if event.get("cat") == "Node" and "op_name" in event["args"]]
    # Not "mem_in_use_peak", which includes what the arena's blocks are larger than asked for.
    peaks = [
        int(node["mem_bytes_requested_in_use"]) for node in nodes if "mem_bytes_requested_in_use" in node
    ]
    return Cost(max(peaks, default=0), sum(map(_work_of, nodes)))


_FREE = frozenset({"Shape", "Size", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Constant"})
_READS_ROWS = frozenset({"Gather", "GatherElements", "GatherND", "Slice", "Loop", "If", "Scan"})


def _work_of(node: dict[str, Any]) -> float:
    """Returns the work of a node that ran, which is 0 for ops that only describe their input."""
    name = node["op_name"]
    inputs, outputs = (
        [next(iter(described.values())) for described in node[f"{what}_type_shape"] if described]
        for what in ("input", "output")
    )
    if name in _FREE:
        return 0
    read = inputs[1:] if name in _READS_ROWS else inputs
    moved = sum(map(math.prod, (*(() if name in ("Loop", "If", "Scan") else read), *outputs)))
    if name in ("MatMul", "FusedMatMul") and len(inputs[0]) > 1 and len(outputs[0]) > 1:
        (*_, rows, columns), size = inputs[0], outputs[0][-2]
        return float(moved + math.prod(outputs[0]) * (columns if name == "MatMul" or rows == size else rows))
    if name in ("MatMul", "FusedMatMul"):
        return float(moved + max(map(math.prod, inputs)))
    if name in ("Gemm", "FusedGemm"):
        # The root of MK x KN x MN.
        return float(moved + math.sqrt(math.prod(map(math.prod, (*inputs[:2], outputs[0])))))
    if name in ("Conv", "FusedConv", "ConvTranspose"):
        of = outputs[0] if name != "ConvTranspose" else inputs[0]
        return float(moved + math.prod(of) * math.prod(inputs[1][1:]))
    if name in ("LSTM", "GRU", "RNN"):
        return float(moved + math.prod(inputs[0][:2]) * (math.prod(inputs[1]) + math.prod(inputs[2])))
    return float(moved)
