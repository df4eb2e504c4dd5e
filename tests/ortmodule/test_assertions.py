"""Assertions about tensors in a forward: they raise what eager PyTorch raises."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from onnxtrain.ortmodule import ORTModule
from ortmodule.asserting import (
    BeforeIndex,
    BesideCustomFunction,
    Checkpointed,
    InPyTorch,
    OfArgument,
    OfInput,
    OfResult,
    Pooled,
)
from ortmodule.eager import strict

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


NETS = (OfInput, OfResult, OfArgument, BeforeIndex, BesideCustomFunction)


def raised(module: nn.Module, x: torch.Tensor) -> tuple[type[BaseException], str]:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the types are compared
        module(x)
    return caught.type, str(caught.value)


# Dynamo makes a dummy instance while it captures a custom function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("net", NETS, ids=lambda net: net.__name__)
@pytest.mark.parametrize("training", [True, False])
def test_assertion_raises_as_in_eager_pytorch(net: type[nn.Module], training: bool) -> None:
    plain = net()
    ours = strict(plain)
    good, bad = torch.rand(2, 3), torch.tensor([[1.0, 2.0, 3.0], [1e4, float("nan"), 1.0]])
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(ours(good), plain(good))
        assert raised(ours, bad) == raised(plain, bad)
        torch.testing.assert_close(ours(good), plain(good))
        assert raised(ours, bad) == raised(plain, bad)
    assert raised(plain, bad)[0] is AssertionError


def test_assertion_in_a_graph_that_runs_in_pytorch() -> None:
    ours = ORTModule(InPyTorch())
    with pytest.warns(UserWarning, match="runs in PyTorch"):
        ours(torch.rand(2, 3))
    assert raised(ours, torch.full((2, 3), 1e4)) == raised(ours.module, torch.full((2, 3), 1e4))


@pytest.mark.filterwarnings("ignore:ORTModule")
def test_assertion_in_a_checkpoint_is_not_lost() -> None:
    ours = ORTModule(Checkpointed())
    ours(torch.rand(2, 3))
    assert raised(ours, torch.full((2, 3), 1e4))[1].startswith("out of range")


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # PyTorch's own, of forward mode
def test_assertion_beside_derivatives_that_pytorch_computes() -> None:
    plain, x = Pooled(), torch.rand(2, 3, requires_grad=True)
    second, tangents = [], []
    for module in (plain, ORTModule(plain)):
        (first,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), x)[0])
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.detach(), torch.ones(2, 3))
            tangents.append(forward_ad.unpack_dual(module(dual)).tangent)
    torch.testing.assert_close(*second)
    torch.testing.assert_close(*tangents)
