"""Assertions about tensors in a forward: they raise what eager PyTorch raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from ortmodule.eager import Of, strict

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


SIZES: dict[str, Callable[[torch.Tensor], Any]] = {
    "constant operand": lambda x: x[x > 0] + torch.ones(57),
    "broadcast": lambda x: x[x > 10] + torch.ones(7),
    "view": lambda x: x[x > 0].view(17, -1),
    "narrow": lambda x: x[x > 0].narrow(0, 100, 2),
    "split": lambda x: x[x > 0].split([1, 2])[0],
    "row of a few": lambda x: x[x > 0][200],
    "largest of a few": lambda x: x[x > 0].topk(200)[0],
    "position of the largest of none": lambda x: x[x > 100].argmax(),
    "written row": lambda x: x.select_scatter(x[0] * 2, 0, 2),
    "written row from the end": lambda x: x.select_scatter(x[0] * 2, 0, -4),
    "written row of a few": lambda x: x[x[:, 0] > -10].select_scatter(x[0], 0, 200),
    "written rows": lambda x: x.slice_scatter(torch.ones(3, 3), 0, 0, 3),
    "select": lambda x: x.masked_select(x > 0).select(0, 200),
    "select by a number": lambda x: x.select(0, int(x.abs().sum().item()) + 100),
}
"""Functions that raise in eager PyTorch for some or all numbers of rows, or number of positive elements."""


RAISING_UNUSED = (
    "constant operand",
    "view",
    "narrow",
    "split",
    "largest of a few",
    "select",
    "select by a number",
)
"""Functions of :data:`SIZES` that also raise if their results are not used: those with data-dependent sizes."""


@pytest.mark.filterwarnings("ignore:ORTModule")
@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("name", SIZES)
def test_operators_raise_for_sizes_as_in_eager_pytorch(name: str, used: bool) -> None:
    def function(module: Of, x: torch.Tensor) -> Any:
        result = module.raising(x)
        return (result, x + 1) if used else x + 1

    plain = Of(function, raising=SIZES[name])
    for rows in ((5, 2), (2, 5), (2, 2)):
        ours = ORTModule(plain)
        for count in rows:
            x = torch.linspace(-1, 11, 3 * count).reshape(count, 3)
            try:
                expected = plain(x)
            except (LookupError, RuntimeError) as error:
                if used or name in RAISING_UNUSED:
                    with pytest.raises(type(error) if used else (IndexError, RuntimeError)):
                        ours(x)
            else:
                torch.testing.assert_close(ours(x), expected)
