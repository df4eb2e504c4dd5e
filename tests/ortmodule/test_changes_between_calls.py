"""A change of a model between two calls is seen by the next one, also of frozen layers, which autograd never meets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule.eager import compare, gradients, strict

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


def partly_frozen() -> nn.Sequential:
    """Returns a frozen convolution and normalisation, a trained convolution, and a trained head."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Hardswish(), nn.Conv2d(4, 4, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
    )  # fmt: skip
    model[:2].requires_grad_(False)
    model[1].eval()
    return model


def training_step(model: nn.Module, x: torch.Tensor) -> Any:
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    return loss.detach(), gradients(model)


def moved(model: Any) -> None:
    model[0].weight.data = model[0].weight.data.clone().mul_(0.5)


def moved_and_back(model: Any) -> None:
    first = model[0].weight.data
    model[0].weight.data = torch.full_like(first, 0.1)
    first.fill_(0.2)
    model[0].weight.data = first


def written_through_data(model: Any) -> None:
    model[0].weight.data.mul_(0.5)


def written_by_numpy(model: Any) -> None:
    """Version counters do not tell."""
    model[0].weight.detach().numpy()[:] *= 0.5


def written_under_no_grad(model: Any) -> None:
    with torch.no_grad():
        model[1].running_mean.add_(0.5)
        model[0].bias.sub_(1)


def replaced(model: Any) -> None:
    model[0].weight = nn.Parameter(torch.full((4, 3, 3, 3), 0.1), requires_grad=False)


def resized(model: Any) -> None:
    model[0].weight = nn.Parameter(torch.full((4, 3, 2, 2), 0.1), requires_grad=False)


def channels_last(model: Any) -> None:
    model[0].weight.data = model[0].weight.data.contiguous(memory_format=torch.channels_last)


def child_replaced(model: Any) -> None:
    model[0] = nn.Conv2d(3, 4, 3).requires_grad_(False)
    nn.init.constant_(model[0].weight, 0.1)
    nn.init.constant_(model[0].bias, 0.1)


def trained(model: Any) -> None:
    model[0].requires_grad_(True)


def frozen(model: Any) -> None:
    model[3].requires_grad_(False)


def all_but_one_frozen(model: Any) -> None:
    model.requires_grad_(False)
    model[6].bias.requires_grad_(True)


def statistics_of_the_batch(model: Any) -> None:
    model[1].train()


def attribute_set(model: Any) -> None:
    model[0].padding = (1, 1)


def shared(model: Any) -> None:
    """Two layers with one weight."""
    model[1].weight = model[1].bias


def hook_added(model: Any) -> None:
    model[0].register_forward_hook(lambda layer, args, output: output * 2)


def hook_with_kwargs_added(model: Any) -> None:
    model[2].register_forward_hook(
        lambda layer, args, kwargs, output: output * (2 + len(kwargs)), with_kwargs=True
    )


def pre_hook_with_kwargs_added(model: Any) -> None:
    model[2].register_forward_pre_hook(lambda layer, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)


def backward_hook_added(model: Any) -> None:
    model[6].register_full_backward_hook(lambda layer, into, out: (into[0] * 2,))


def hook_replaced_by_one_with_kwargs(model: Any) -> None:
    """The number of hooks stays the same."""
    model[0].register_forward_hook(lambda layer, args, output: output + 1)
    training_step(model, torch.ones(2, 3, 6, 6))
    model[0]._forward_hooks.clear()
    hook_with_kwargs_added(model)
    model[0].register_forward_hook(
        lambda layer, args, kwargs, output: output * (3 + len(kwargs)), with_kwargs=True
    )


CHANGES = [
    moved, moved_and_back, written_through_data, written_by_numpy, written_under_no_grad, replaced, resized,
    channels_last, child_replaced, trained, frozen, all_but_one_frozen, statistics_of_the_batch, attribute_set, shared,
    hook_added, hook_with_kwargs_added, pre_hook_with_kwargs_added, backward_hook_added,
    hook_replaced_by_one_with_kwargs,
]  # fmt: skip


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: Callable[[Any], None]) -> None:
    def program(model: nn.Module) -> Any:
        x = torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)
        results = [training_step(model, x), training_step(model, x)]
        change(model)
        return [*results, training_step(model, x), training_step(model, x)]

    compare(partly_frozen(), program, wrap=strict)


def test_dtypes_may_change() -> None:
    def program(model: nn.Module) -> Any:
        x = torch.linspace(-1, 1, 6).reshape(2, 3)
        results = [training_step(model, x)]
        model.double()
        return [*results, training_step(model, x.double()), training_step(model.float(), x)]

    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    compare(model, program, wrap=strict)


def test_a_frozen_weight_that_is_written_to_before_backward_raises() -> None:
    """The gradient of the first layer reads the weight of the second, frozen one."""

    def program(model: nn.Module) -> Any:
        output = model(torch.ones(2, 3)).sum()
        with torch.no_grad():
            model[2].weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.backward()

    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    model[2].requires_grad_(False)
    compare(model, program, wrap=strict)


def test_second_derivatives_past_frozen_layers() -> None:
    def program(model: nn.Module) -> Any:
        x = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return gradient.detach(), x.grad, gradients(model)

    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    model[2].requires_grad_(False)
    compare(model, program, wrap=strict)


def test_a_trained_input_that_no_gradient_reaches_beside_frozen_ones() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read = nn.Parameter(torch.ones(3))
            self.unread = nn.Parameter(torch.ones(3))
            self.kept = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.read * self.kept + self.unread.detach()

    def program(model: nn.Module) -> Any:
        model(torch.ones(2, 3)).sum().backward()
        return gradients(model)

    compare(Net(), program, wrap=strict)
