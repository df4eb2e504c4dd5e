"""Decides how many calls run in PyTorch before another capture pays off, e.g. a capture of the evaluation mode."""

from __future__ import annotations

import threading

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from onnxtrain.ortmodule import _torch
from onnxtrain.ortmodule._torch import pytree
from onnxtrain.ortmodule.capture._nodes import hint_of

MAX_CALLS = 64
"""Maximum number of calls that PyTorch runs instead of a capture."""

# Measured on one core of an AMD EPYC (Zen 5). The decision has to be the same on every machine and in every run, so the
# times are estimated from the graph, not taken.
_CAPTURE_SECONDS = 0.2
_CAPTURE_SECONDS_PER_NODE = 4e-3
_CALL_SECONDS_PER_NODE = 15e-6
_FLOPS_PER_SECOND = 2e10
"""Assumed number of FLOPs of a forward pass, divided by the time of the forward and backward pass in seconds."""

_SAVED = 0.5
"""The estimated fraction of PyTorch's time that ONNX Runtime saves."""


class BreakEven:
    """Estimates whether another capture of an ORTModule pays off.

    The first call is always captured. When a later call needs another capture, e.g. because the model is in evaluation
    mode, PyTorch runs such calls until ONNX Runtime would have saved about as much time as the capture takes.

    Args:
        enabled: False to capture in every call that needs it.

    Attributes:
        of_thread: holds the value of `in_pytorch`; reading it there is faster than through the property.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._capture = 0.0
        self._call = 0.0
        self.of_thread = _OfThread()

    def add(self, graph: fx.GraphModule) -> None:
        """Adds the costs of a compiled graph to the estimated times of a capture and of a call.

        Args:
            graph: the functional ATen graph that was compiled.
        """
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        self._capture += _CAPTURE_SECONDS + len(calls) * _CAPTURE_SECONDS_PER_NODE
        self._call += len(calls) * _CALL_SECONDS_PER_NODE + sum(map(_flops, calls)) / _FLOPS_PER_SECOND

    @property
    def calls(self) -> int:
        """The number of calls that PyTorch runs before another capture pays off, from 0 to `MAX_CALLS`."""
        # A checkpoint computes the same call twice and requires that both save the same tensors.
        if not self._enabled or not self._call or _torch.saved_tensors_hooks(True) is not None:
            return 0
        return min(MAX_CALLS, int(self._capture / (_SAVED * self._call)))

    @property
    def in_pytorch(self) -> bool:
        """True if PyTorch runs this thread's current call, because another capture would not pay off yet."""
        return self.of_thread.in_pytorch

    @in_pytorch.setter
    def in_pytorch(self, value: bool) -> None:
        self.of_thread.in_pytorch = value


class _OfThread(threading.local):
    """The state of one thread."""

    in_pytorch = False


def _flops(node: fx.Node) -> int:
    """Returns the number of FLOPs of a node; 0 except for matrix products, convolutions and attention."""
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    values = fx.map_arg((node.args, node.kwargs, node), lambda n: n.meta["val"])
    # Numbers in place of symbols: comparisons of symbols would add guards.
    args, kwargs, result = pytree.tree_map_only(torch.Tensor, _sizes, values)
    return int(count(*args, **kwargs, out_val=result))


def _sizes(tensor: torch.Tensor) -> list[int]:
    """Returns the sizes that a tensor has in the captured call, with 1 in place of data-dependent sizes."""
    return [size if (size := hint_of(symbol)) is not None else 1 for symbol in tensor.shape]
