"""Names for generated programs, which begin with `from ortmodule.fuzz.prelude import *`."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from ortmodule.custom_functions import Dirty, Halves, Once, Scaled, Scaling, SetUp, StraightThrough, VmapRule

__all__ = [
    "FLOAT",
    "Add",
    "Dirty",
    "F",
    "Halves",
    "Masked",
    "Once",
    "Scaled",
    "Scaling",
    "SetUp",
    "StraightThrough",
    "VmapRule",
    "add_one",
    "aliases",
    "attempted",
    "attended",
    "backward",
    "bools",
    "checkpoint",
    "contextlib",
    "default_dtype",
    "deterministic",
    "double_grad",
    "double_input",
    "double_output",
    "gc",
    "gradients",
    "halve_grad",
    "halved",
    "in_thread",
    "ints",
    "modes",
    "nn",
    "note",
    "packed",
    "parametrizations",
    "pixel_unshuffled",
    "randn",
    "state",
    "torch",
    "unpacked",
    "untied",
    "wrapped",
]

FLOAT = torch.float32
"""The dtype that programs compute in; float64 while the reference runs."""


def in_thread(work: Callable[[], Any]) -> Any:
    """Returns what a function returns in another thread, or raises what it raises there."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Programs that are imported and run in here compute in float64."""
    global FLOAT
    FLOAT = torch.float64
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        FLOAT = torch.float32
        torch.set_default_dtype(torch.float32)


noise = 0.0
"""Relative size of what `randn` adds to its numbers, to see how sensitive a program is."""


def randn(*size: int) -> torch.Tensor:
    """The same numbers in float32 and in float64."""
    result = torch.randn(size, dtype=torch.float32).to(FLOAT)
    return result if not noise else disturbed(result)


def disturbed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with relative noise; PyTorch's generator is left as it was."""
    generator = torch.Generator().manual_seed(tensor.numel() + round(noise * 1e12))
    return tensor * (1 + noise * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))


def ints(high: int, *size: int) -> torch.Tensor:
    return torch.randint(0, high, size)


def bools(*size: int) -> torch.Tensor:
    return torch.rand(size, dtype=torch.float32) > 0.5


class Masked(nn.Module):
    """Nested dropout layers of one kind with two probabilities."""

    def __init__(self, kind: str, p: float, q: float) -> None:
        super().__init__()
        layer = getattr(nn, kind)
        self.layers = nn.Sequential(layer(p), nn.Sequential(nn.Tanh(), layer(q)), layer(p))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


wrap: Callable[[nn.Module], Any] = lambda net: net
"""Prepares a module for the current run, e.g. ORTModule."""


def wrapped(net: nn.Module) -> Any:
    """Returns the module as the program is run: itself, compiled, or in an ORTModule."""
    return wrap(net)


def attempted(see: Any, call: Callable[[], Any]) -> Any:
    """Returns what a call returns, or None and records the kind of its error."""
    try:
        return call()
    except Exception as error:
        see("error", type(error).__name__)
        return None


def modes() -> dict[str, Any]:
    """Returns the modes of the thread, and the place in the stream of random numbers."""
    return thread_modes() | {"next random": torch.random.get_rng_state().sum(dtype=torch.int64).item()}


def thread_modes() -> dict[str, Any]:
    """Returns the modes that a forward may leave switched in the thread."""
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return {
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu")), nesting),
        "cached casts": torch.is_autocast_cache_enabled(),
        "transforms": torch._C._functorch.get_dynamic_layer_stack_depth(),
        "tangents": (forward_ad._current_level, torch._C._is_fwd_grad_enabled()),
        "hooks": torch._C._autograd._saved_tensors_hooks_is_enabled(),
        "attention": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
        "threads": torch._C._is_multithreading_enabled(),
        "anomalies": torch.is_anomaly_enabled(),
        "functions": len(torch.overrides._get_current_function_mode_stack()),
        "mkldnn": torch.backends.mkldnn.enabled,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": "own" if torch.get_default_dtype() == FLOAT else str(torch.get_default_dtype()),
    }


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def packed(tensor: torch.Tensor) -> Any:
    return tensor, 1.0


def unpacked(kept: Any) -> torch.Tensor:
    return kept[0] * kept[1]


class Add(nn.Module):
    """A module with a parameter and a buffer that it counts in."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(size))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.weight * self.calls


def add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def untied(x: torch.Tensor) -> torch.Tensor:
    """Returns `x` without equal numbers: `kthvalue` and `topk` may give the place of any of these."""
    return x + torch.linspace(0, 0.1, x.numel(), dtype=x.dtype).reshape(x.shape)


def pixel_unshuffled(x: torch.Tensor) -> torch.Tensor:
    """Returns blocks of 2x2 pixels as channels.

    Eager PyTorch (2.13) leaves an empty tensor as it is, against its documentation and its kernel for shapes.
    """
    return F.pixel_unshuffle(x, 2).reshape(x.shape[0], 4 * x.shape[1], 2, 2)


def attended(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, k, is_causal=q.shape[-2] == k.shape[-2])


def double_output(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2 if isinstance(output, torch.Tensor) else None


def double_input(module: nn.Module, args: Any) -> Any:
    return (args[0] * 2, *args[1:])


def halve_grad(module: nn.Module, received: Any, given: Any) -> Any:
    return tuple(None if g is None else g * 0.5 for g in received)


def double_grad(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


class note:
    """A hook of any kind that remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, *args: Any) -> None:
        leaves = [
            leaf.detach().clone() for leaf in pytree.tree_leaves(args[1:] or args) if torch.is_tensor(leaf)
        ]
        self.seen.append(leaves)


def _leaves(out: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]


def objective(out: Any) -> torch.Tensor | None:
    """A scalar of all outputs that have a gradient, with another weight for each element."""
    total = None
    for leaf in _leaves(out):
        if leaf.requires_grad and leaf.dtype.is_floating_point:
            weights = torch.cos(torch.arange(leaf.numel(), dtype=FLOAT)).reshape(leaf.shape)
            part = (leaf.to(FLOAT) * weights).sum()
            total = part if total is None else total + part
    return total


def halved(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value * 0.5 if value.dtype == FLOAT else value.clone() for name, value in values.items()}


def backward(*outs: Any, create_graph: bool = False) -> Any:
    """Differentiates what the outputs allow."""
    total = objective(outs)
    if total is not None:
        total.backward(create_graph=create_graph)
    return total


def gradients(net: nn.Module, inputs: dict[str, Any], see: Any) -> None:
    """Records the gradients of parameters and inputs."""
    for name, parameter in net.named_parameters():
        see(f"{name}.grad", parameter.grad)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_leaf:
            see(f"{name}.grad", value.grad)


def state(net: nn.Module, see: Any) -> None:
    """Records parameters and buffers."""
    for name, value in net.state_dict().items():
        see(name, value)


def aliases(net: nn.Module, inputs: dict[str, Any], out: Any, see: Any) -> None:
    """Records which outputs are, or share the memory of, inputs, parameters and buffers."""
    known = {**inputs, **dict(net.named_parameters()), **dict(net.named_buffers())}
    held = [(name, value) for name, value in known.items() if torch.is_tensor(value) and value.numel()]
    found = []
    for leaf in _leaves(out):
        memory = leaf.untyped_storage().data_ptr()
        found.append(
            [
                (name, leaf is value, leaf._is_view() and leaf.storage_offset())
                for name, value in held
                if leaf.numel() and value.untyped_storage().data_ptr() == memory
            ]
        )
    see("aliases", found)
