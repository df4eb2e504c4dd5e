"""The comparison with eager PyTorch sees results, flags, inputs, gradients, state and random numbers that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule.eager import Of, compare_steps

pytestmark = pytest.mark.torch


def net(m: Of, x: torch.Tensor) -> torch.Tensor:
    m.total += x.detach().sum()
    return x * m.weight


def then(after: Callable[[Of, torch.Tensor, torch.Tensor], Any]) -> Callable[[Of], Of]:
    """Return a wrapper that adds `after(module, input, result)` to the module's own forward."""

    def wrap(module: Of) -> Of:
        module.function = lambda m, x: after(m, x, net(m, x))
        return module

    return wrap


def beside(work: Callable[[Of, torch.Tensor], object]) -> Callable[[Of], Of]:
    """Return a wrapper that also does `work(module, input)`."""
    return then(lambda m, x, y: (work(m, x), y)[1])


@pytest.mark.parametrize(
    ("wrap", "where"),
    [
        (then(lambda m, x, y: y * 1.001), r"\['results'\]"),
        (then(lambda m, x, y: y.double()), r"\['results'\]"),
        (then(lambda m, x, y: y.detach()), r"\['requires_grad'\]\[0\]: False is not True"),
        (beside(lambda m, x: x.data.mul_(1.001)), r"\['inputs'\]"),
        (then(lambda m, x, y: y + (m.weight - m.weight.detach())), r"\['gradients'\]\['weight'\]"),
        (then(lambda m, x, y: y + (x - x.detach())), r"\['gradients of inputs'\]"),
        (beside(lambda m, x: m.total.add_(1)), r"\['state'\]\['total'\]"),
        (beside(lambda m, x: torch.rand(())), r"\['generator'\]"),
    ],
    ids=["value", "dtype", "flag", "input", "gradient", "gradient of input", "state", "generator"],
)
def test_a_difference_is_named(wrap: Any, where: str) -> None:
    torch.manual_seed(0)
    plain = Of(net, weight=nn.Parameter(torch.ones(3)), total=torch.zeros(()))
    compare_steps(plain, (2, 3), wrap=then(lambda m, x, y: y))
    with pytest.raises(AssertionError, match=where):
        compare_steps(plain, (2, 3), wrap=wrap)


def test_a_missing_gradient_is_no_gradient_of_zeros() -> None:
    plain = Of(lambda m, x: x + 0 * m.weight, weight=nn.Parameter(torch.ones(3)))
    with pytest.raises(AssertionError, match=r"\['gradients'\]\['weight'\]: None is not a tensor"):
        compare_steps(
            plain, (2, 3), wrap=lambda m: Of(lambda m, x: x + 0 * m.weight.detach(), weight=m.weight)
        )


def test_a_warning_that_is_asked_for_has_to_come() -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT WARN"):
        compare_steps(Of(lambda _, x: x * 2), (2, 3), wrap=lambda module: module, warns="never")
