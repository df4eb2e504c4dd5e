"""Inputs that a module writes to: their gradients, and those of what uses them afterwards, as in eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from onnxtrain.ortmodule import ORTModule
from ortmodule.test_engine import pair

pytestmark = pytest.mark.torch


class Writer(nn.Module):
    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(x, self.linear.weight[:3])
        return self.linear(x)


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "fill": lambda x, w: x.fill_(0.5),
    "zero": lambda x, w: x.zero_(),
    "copy": lambda x, w: x.copy_(w),
    "copy_detached": lambda x, w: x.copy_(w.detach()),
    "scale": lambda x, w: x.mul_(2.0),
    "column": lambda x, w: x[:, 0].zero_(),
    "all": lambda x, w: x[:].fill_(1.0),
}


@pytest.mark.parametrize("used_later", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_gradients(name: str, used_later: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    start = torch.randn(3, 4)
    results = []
    for module in pair(Writer(WRITES[name])):
        leaf = start.clone().requires_grad_()
        x = leaf * 1
        loss = module(x).square().sum()
        if used_later:
            loss = loss + (x**3).sum()
        loss.backward()
        results.append([leaf.grad, x.detach(), *(p.grad for p in module.parameters())])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


class Noting(nn.Module):
    """Writes to a parameter where that is allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return self.linear(x)


def test_writing_to_a_parameter() -> None:
    """Its gradient is that of the value written, although what was written depends on the parameter."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Noting()
    ours = ORTModule(copy.deepcopy(plain))
    x = torch.randn(3, 4)
    for _ in range(2):
        ours(x).square().sum().backward()
        plain(x).square().sum().backward()
        torch.testing.assert_close(ours.linear.weight, plain.linear.weight)
        torch.testing.assert_close(ours.linear.weight.grad, plain.linear.weight.grad)
    assert ours.report().runs_in_onnxruntime


def test_writing_to_a_leaf_raises_as_in_pytorch() -> None:
    torch._dynamo.reset()
    ours = ORTModule(Writer(WRITES["fill"]))
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        ours(torch.randn(3, 4, requires_grad=True))
