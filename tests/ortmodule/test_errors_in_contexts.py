"""An error inside a context manager of `forward` leaves modes, generators and buffers as in eager PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from onnxtrain.ortmodule import ORTModule
from ortmodule.fuzz.prelude import default_dtype, deterministic, thread_modes

pytestmark = [
    pytest.mark.torch,
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:ORTModule", "ignore:Anomaly", "ignore:TF32"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),  # PyTorch's own, of forward mode
]


CONTEXTS: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no autocast": lambda: torch.autocast("cpu", enabled=False),
    "fork_rng": lambda: torch.random.fork_rng(devices=[]),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "disable_saved_tensors_hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
    "sdpa_kernel": lambda: sdpa_kernel(SDPBackend.MATH),
    "dual_level": forward_ad.dual_level,
    "set_multithreading_enabled": lambda: torch.autograd.set_multithreading_enabled(False),
    "detect_anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "device": lambda: torch.device("cpu"),
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "default dtype": lambda: default_dtype(torch.float64),
    "deterministic": deterministic,
}


def by_index(table: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return table[i]


def by_python(table: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    if i.max().item() > 5:
        raise ValueError("too large")
    return table[i]


def by_assert(table: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    assert (i < 5).all(), "too large"
    return table[i]


def by_check(table: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    torch._check(bool((i < 5).all()), lambda: "too large")
    return table[i]


def after_a_break(table: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return table[i]


def in_a_refused_graph(table: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    """ORTModule gives up while it traces `torch.cond`, inside the context."""
    return torch.cond(table.sum() > 1e6, torch.zeros_like, torch.clone, (table,))[i]


def in_vmap(table: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(lambda index: table[index])(i)


def in_grad(table: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda x: x[i].sum())(table)[:2]


def in_jvp(table: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(lambda x: x[i], (table,), (torch.ones_like(table),))[1]


ERRORS = [
    by_index,
    by_python,
    by_assert,
    by_check,
    after_a_break,
    in_a_refused_graph,
    in_vmap,
    in_grad,
    in_jvp,
]


class Net(torch.nn.Module):
    def __init__(self, context: Callable[[], Any], read: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(5, 4))
        self.register_buffer("calls", torch.zeros(()))
        self.context, self.read = context, read

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        dropped = torch.nn.functional.dropout(self.linear.weight.sum(0))
        with self.context():
            x = self.read(self.table, i)
        self.calls.add_(1)
        return x.float().detach().clone() + torch.nn.functional.dropout(dropped)


def after_an_error(net: Net, run: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Returns the kind of the error and what it leaves behind, after a call without an error."""
    outcome(run)
    calls = net.calls.clone()
    torch.manual_seed(1)
    with pytest.raises((IndexError, ValueError, AssertionError, RuntimeError)) as caught:
        run(torch.tensor([0, 7]))
    return {
        "error": caught.type,
        "modes": thread_modes(),
        "calls": (net.calls - calls).item(),
        "drawn": torch.rand(1).item(),
        "next": outcome(run),
    }


def outcome(run: Callable[[torch.Tensor], torch.Tensor]) -> bool | type[Exception]:
    """Returns whether the result of a call requires a gradient, or the kind of its error."""
    try:
        return run(torch.tensor([0, 1])).requires_grad
    except RuntimeError as error:  # under save_on_cpu, eager PyTorch cannot run torch.func.grad
        return type(error)


@pytest.mark.parametrize("read", ERRORS, ids=[read.__name__ for read in ERRORS])
@pytest.mark.parametrize("context", CONTEXTS)
def test_an_error_leaves_what_eager_pytorch_leaves(context: str, read: Callable[..., torch.Tensor]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    nets = [Net(CONTEXTS[context], read) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    before = thread_modes()
    expected = after_an_error(nets[0], nets[0])
    assert expected["modes"] == before
    assert after_an_error(nets[1], ORTModule(nets[1])) == expected
