"""The programs of a first torch.nn.Module tutorial: the same losses, buffers and hook logs as PyTorch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from onnxtrain.ortmodule import ORTModule

STEPS = 20


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def train(
    model: nn.Module,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer_of: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
) -> list[float]:
    """The loop that every tutorial has; returns the losses."""
    optimizer = optimizer_of(model.parameters())
    losses = []
    for x, target in batches:
        optimizer.zero_grad()
        loss = loss_of(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def regression(count: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(count, 8, 4)
    return [(rows, torch.sin(rows.sum(dim=1, keepdim=True))) for rows in x]


def assert_trains_alike(plain: nn.Module, *arguments: Any, falls: bool = True) -> ORTModule:
    """Trains a copy in an ORTModule: the losses, parameters and buffers are PyTorch's."""
    model = ORTModule(copy.deepcopy(plain))
    expected = train(plain, *arguments)
    losses = train(model, *arguments)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-6)
    assert not falls or losses[-1] < losses[0]
    assert list(model.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-3, atol=1e-5)
    assert model.report().runs_in_onnxruntime, str(model.report())
    return model


class Mlp(nn.Module):
    def __init__(self, activation: nn.Module, out: int = 1) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 16)
        self.activation = activation
        self.out = nn.Linear(16, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.activation(self.hidden(x)))


def test_mlp_with_mse_and_sgd() -> None:
    x, target = regression(1)[0]
    assert_trains_alike(Mlp(nn.ReLU()), [(x, target)] * STEPS, nn.MSELoss(), sgd)


def test_classifier_with_cross_entropy() -> None:
    x = torch.randn(30, 4)
    labels = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    model = assert_trains_alike(Mlp(nn.Tanh(), 3), [(x, labels)] * STEPS, nn.CrossEntropyLoss(), sgd)
    assert functional.softmax(model.eval()(x), dim=1).sum(dim=1).allclose(torch.ones(30))


def test_leaky_relu_with_100_steps_of_adam() -> None:
    def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=1e-3)

    x, target = regression(1)[0]
    assert_trains_alike(Mlp(nn.LeakyReLU(0.1)), [(x, target)] * 100, nn.MSELoss(), adam)


def test_a_sequential_trains_as_in_pytorch() -> None:
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    x, target = regression(1)[0]
    model = assert_trains_alike(plain, [(x, target)] * STEPS, nn.MSELoss(), sgd)
    assert isinstance(model[0], nn.Linear)
    assert len(model) == 5


class RunningNorm(nn.Module):
    """Buffers that do not exist before the first batch; the statistics of the batch get no gradient."""

    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None

    def __init__(self, momentum: float = 0.1) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("running_mean", None)
        self.register_buffer("running_var", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            mean, var = x.mean(dim=0).detach(), x.var(dim=0, unbiased=False).detach()
            if self.running_mean is None or self.running_var is None:
                self.running_mean, self.running_var = mean, var
            else:
                self.running_mean = torch.lerp(self.running_mean, mean, self.momentum)
                self.running_var = torch.lerp(self.running_var, var, self.momentum)
        assert self.running_mean is not None
        assert self.running_var is not None
        return (x - self.running_mean) / torch.sqrt(self.running_var + 1e-5)


def test_buffers_that_are_none_at_first() -> None:
    plain = nn.Sequential(nn.Linear(4, 8), RunningNorm(), nn.Linear(8, 1))
    assert "1.running_mean" not in plain.state_dict()
    model = assert_trains_alike(plain, regression(), nn.MSELoss(), sgd, falls=False)
    assert "1.running_mean" in model.state_dict()
    assert type(model.module[1].running_mean) is torch.Tensor
    x = torch.randn(3, 4)
    torch.testing.assert_close(model.eval()(x), plain.eval()(x), rtol=1e-4, atol=1e-5)
    assert model.module[1].running_mean.equal(model.state_dict()["1.running_mean"])


def test_forward_hook_that_prints(capsys: pytest.CaptureFixture[str]) -> None:
    def prints(module: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        print(type(module).__name__, tuple(args[0].shape), "->", tuple(out.shape))

    printed = []
    plain = Mlp(nn.ReLU())
    for model in (plain, ORTModule(copy.deepcopy(plain))):
        for module in (model, model.hidden, model.out):
            module.register_forward_hook(prints)
        train(model, regression(2), nn.MSELoss(), sgd)
        printed.append(capsys.readouterr().out)
    assert printed[0].count("Linear (8, 4) -> (8, 16)") == 2
    assert printed[1] == printed[0]


def test_backward_hooks_see_the_gradients_of_pytorch() -> None:
    plain = Mlp(nn.ReLU())
    logs: list[list[tuple[str, list[torch.Tensor]]]] = []
    for model in (plain, ORTModule(copy.deepcopy(plain))):
        logs.append(log := [])

        def watch(module: nn.Module, before: Any, after: Any, log: Any = log) -> None:
            log.append((type(module).__name__, [g.clone() for g in (*before, *after) if g is not None]))

        for module in (model, model.hidden, model.out):
            module.register_full_backward_hook(watch)
        train(model, [(x.requires_grad_(), target) for x, target in fixed_batches()], nn.MSELoss(), sgd)
    assert len(logs[0]) == 6
    assert [name for name, _ in logs[1]] == [name for name, _ in logs[0]]
    for (_, actual), (_, expected) in zip(*reversed(logs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def fixed_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return regression(2)
