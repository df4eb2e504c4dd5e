"""Masks of dropout that native kernels draw are those of PyTorch's generator, and advance it alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from kernels.against_body import LEVELS, needs_kernels
from onnxtrain.ortmodule import ORTModule, _bernoulli
from onnxtrain.ortmodule._bernoulli import draws_masks, fill_mask
from onnxtrain.runtime.kernels import LEVEL, VARIABLE

pytestmark = needs_kernels

SIZES = (2048, 2049, 2500, 624 * 8, 100_001)
PROBABILITIES = (0.0, 2**-60, 2**-30, 0.1, 1 / 3, 0.5, 0.9, 1 - 2**-53, 1.0)


def drawn(fill: Callable[[torch.Tensor, float], torch.Tensor], before: int) -> list[torch.Tensor]:
    """Returns masks, and what is drawn after them; `before` numbers are drawn first."""
    torch.manual_seed(3)
    torch.rand(before)
    results = []
    for size in SIZES:
        for p in PROBABILITIES:
            results += [fill(torch.empty(size, dtype=torch.bool), p), torch.rand(3), torch.randn(5)]
    return [*results, torch.get_rng_state()]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("before", [0, 1, 2, 623, 624, 625, 1247])
def test_masks_are_those_of_pytorch(before: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEVEL, level)
    expected = drawn(lambda mask, p: mask.bernoulli_(p), before)
    for mine, theirs in zip(drawn(fill_mask, before), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("p", [-0.5, 1.5, float("nan")])
def test_the_error_of_pytorch_for_no_probability(p: float) -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="bernoulli_ expects p to be in"):
        fill_mask(torch.empty(4096, dtype=torch.bool), p)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_memory_order_of_a_permuted_mask() -> None:
    masks = []
    for fill in (fill_mask, torch.Tensor.bernoulli_):
        torch.manual_seed(0)
        masks.append(fill(torch.empty_permuted((32, 16, 10), (2, 0, 1), dtype=torch.bool), 0.5))
    assert torch.equal(*masks)


def test_numbers_that_another_thread_draws_meanwhile_are_not_drawn_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others, draw = [], _bernoulli._draw

    def interrupted(state: torch.Tensor, p: float, mask: torch.Tensor) -> bool:
        if len(others) < count:
            others.append(torch.rand(()))
        return draw(state, p, mask)

    monkeypatch.setattr(_bernoulli, "_draw", interrupted)
    for count in (1, 2, 9):
        others.clear()
        torch.manual_seed(0)
        mask = fill_mask(torch.empty(4096, dtype=torch.bool), 0.5)
        torch.manual_seed(0)
        torch.rand(len(others))
        assert len(others) == min(count, 3)
        assert torch.equal(mask, torch.empty(4096, dtype=torch.bool).bernoulli_(0.5))


def test_a_pytorch_that_draws_in_another_way_draws_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "on")
    _bernoulli._agrees_with_pytorch.cache_clear()
    assert draws_masks()
    _bernoulli._agrees_with_pytorch.cache_clear()
    bernoulli = torch.Tensor.bernoulli_
    monkeypatch.setattr(
        torch.Tensor, "bernoulli_", lambda t, p, generator: bernoulli(t, p / 2, generator=generator)
    )
    assert not draws_masks()
    _bernoulli._agrees_with_pytorch.cache_clear()


def test_without_kernels_pytorch_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    assert not draws_masks()


class Drops(nn.Module):
    """Dropout of float32 and float64 values, of a transposed one, and of one that PyTorch draws for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 64), nn.Linear(64, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.first(x), 0.3)
        x = nn.functional.dropout(x.transpose(0, 1), 0.2).transpose(0, 1)
        kept, mask = torch.native_dropout(x.double(), 0.25, True)
        return nn.functional.dropout(self.second(kept * mask), 0.5)


@pytest.mark.parametrize("kernels", ["on", "off"])
def test_a_seed_gives_the_numbers_of_eager_pytorch(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, kernels)
    torch.manual_seed(0)
    net, x = Drops(), torch.randn(100, 40)
    wrapped, results = ORTModule(net), []
    for module in (net, wrapped):
        for _ in range(3):
            torch.manual_seed(7)
            net.zero_grad()
            y = module(x)
            y.square().sum().backward()
            results.append([y.detach(), torch.rand(2), *(p.grad.clone() for p in net.parameters())])
    for mine, theirs in zip(results[3:], results[:3], strict=True):
        torch.testing.assert_close(mine, theirs)


def test_infinities_and_nan_that_are_dropped_stay_nan() -> None:
    x = torch.full((4096,), torch.inf)
    x[::2] = torch.nan

    class Drop(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(x, 0.5)

    results = []
    for module in (Drop(), ORTModule(Drop())):
        torch.manual_seed(0)
        results.append(module(x))
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
    assert results[0].isinf().any()
