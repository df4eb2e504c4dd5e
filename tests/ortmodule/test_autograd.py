"""Derivatives as PyTorch's autograd asks for them: of some outputs, twice, of batches, and freed when they are done."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ortmodule.test_engine import gradients, pair

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 3), nn.Linear(4, 1)])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        h = self.trunk(x).relu()
        return [head(h) for head in self.heads]


@pytest.mark.parametrize("used", [(0,), (1, 2), (0, 1, 2)])
def test_heads_that_a_loss_does_not_use_have_no_gradient(used: tuple[int, ...]) -> None:
    ours, plain = pair(Heads())
    x = torch.randn(5, 4)
    for module in (ours, plain):
        outputs = module(x)
        sum(outputs[index].square().sum() for index in used).backward()
    for name, want in gradients(plain).items():
        got = gradients(ours)[name]
        assert (got is None) == (want is None), name
        if want is not None:
            torch.testing.assert_close(got, want, msg=name)


def test_weight_decay_leaves_unused_heads_alone() -> None:
    ours, plain = pair(Heads())
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (ours, plain)]
    for step, batch in enumerate((5, 3, 4, 6)):
        x = torch.randn(batch, 4)
        for module, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            module(x)[step % 2].square().sum().backward()
            optimizer.step()
    for got, want in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


class Root(nn.Module):
    """Its second output has no finite derivative at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.w * x
        return h, h.sqrt()


def test_an_unused_output_adds_nothing_where_its_derivative_is_infinite() -> None:
    ours, _ = pair(Root())
    ours(torch.ones(3))[0].sum().backward()
    assert ours.w.grad.tolist() == [1.0, 1.0, 1.0]


class Pieces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(4, 6), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *self.linear(x).chunk(2, -1), self.other(x)


def test_pieces_of_one_result() -> None:
    ours, plain = pair(Pieces())
    for batch in (3, 5):  # symbolic from the second on
        x, steps = torch.randn(batch, 4), []
        for module in (ours, plain):
            module.zero_grad()
            module(x)[1].square().sum().backward()
            steps.append(module.linear.weight.grad)
            assert module.other.weight.grad is None
        torch.testing.assert_close(*steps)
