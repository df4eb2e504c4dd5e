"""One ORTModule in several threads: each gets what eager PyTorch gives it."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain.ortmodule import ORTModule
from ortmodule.eager import strict

pytestmark = pytest.mark.torch

THREADS = 4
ROUNDS = int(os.environ.get("ONNXTRAIN_THREAD_CALLS", "400")) // 80


class Net(nn.Module):
    """A net with a branch in Python, so that threads are in different graphs, and first calls are captures."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, deep: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(x)))
        return self.last(hidden * hidden.sigmoid() if deep else hidden)


@pytest.fixture(scope="module")
def pair() -> tuple[nn.Module, ORTModule]:
    """An eager module and an ORTModule, for all tests of this file: a capture takes seconds."""
    torch.manual_seed(0)
    net = Net()
    return net, strict(copy.deepcopy(net))


def batch(number: int) -> tuple[torch.Tensor, bool]:
    generator = torch.Generator().manual_seed(number)  # PyTorch's own one is shared by all threads
    return torch.randn(3, 6, generator=generator), number % 2 == 1


def gradients(model: nn.Module, x: torch.Tensor, deep: bool) -> list[torch.Tensor]:
    """Returns the result and the gradients of input and parameters, without adding to `.grad`."""
    x = x.clone().requires_grad_()
    result = model(x, deep)
    return [result, *torch.autograd.grad(result.square().sum(), [x, *model.parameters()])]


def at_once(work: Callable[[int], Any]) -> list[Any]:
    barrier = threading.Barrier(THREADS)

    def begin(number: int) -> Any:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return [future.result() for future in [pool.submit(begin, number) for number in range(THREADS)]]


def test_threads_that_capture_and_compute_at_once_get_what_eager_gives(
    pair: tuple[nn.Module, ORTModule],
) -> None:
    eager, model = pair

    def work(number: int) -> list[list[torch.Tensor]]:
        return [gradients(model, *batch(number + index)) for index in range(ROUNDS)]

    for number, results in enumerate(at_once(work)):
        for index, found in enumerate(results):
            for ours, theirs in zip(found, gradients(eager, *batch(number + index)), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_forward_in_one_thread_and_backward_in_others(pair: tuple[nn.Module, ORTModule]) -> None:
    eager, model = pair
    results = [model(*batch(number)) for number in range(THREADS)]
    at_once(lambda number: results[number].square().sum().backward())
    for number in range(THREADS):
        eager(*batch(number)).square().sum().backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_modes_of_gradients_belong_to_threads(pair: tuple[nn.Module, ORTModule]) -> None:
    """One thread trains, another one infers, as `torch.no_grad` is a thread's own."""
    eager, model = pair

    def work(number: int) -> None:
        for index in range(ROUNDS):
            x, deep = batch(number + index)
            with torch.set_grad_enabled(number % 2 == 0):
                result = model(x, deep)
            assert result.requires_grad is (number % 2 == 0)
            torch.testing.assert_close(result.detach(), eager(x, deep).detach(), rtol=1e-4, atol=1e-5)

    at_once(work)


def test_steps_of_threads_under_a_lock_train_as_eager_does(pair: tuple[nn.Module, ORTModule]) -> None:
    """As in PyTorch, `.grad` and the optimizer are shared: a step is the user's to lock."""
    eager, model = pair
    lock, order = threading.Lock(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        model(*batch(number)).square().sum().backward()
        optimizer.step()

    def work(number: int) -> None:
        for index in range(6):
            with lock:
                order.append(number + index)
                step(model, optimizer, order[-1])

    at_once(work)
    alone = torch.optim.SGD(eager.parameters(), lr=0.05, momentum=0.9)
    for number in order:
        step(eager, alone, number)
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
