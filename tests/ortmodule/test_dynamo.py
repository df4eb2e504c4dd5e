"""ORTModule's settings of Dynamo hold during its own captures, and other users of Dynamo are left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onnxtrain.ortmodule import ORTModule

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


def test_settings_are_ours_only_while_dynamo_captures_for_us() -> None:
    before = torch._dynamo.config.get_config_copy()
    model = ORTModule(nn.LSTM(2, 3))
    model(torch.ones(4, 1, 2))[0].sum().backward()
    assert model.report().runs_in_onnxruntime
    assert torch._dynamo.config.get_config_copy() == before


class _Stop(Exception):
    pass


def _stop(*_: Any) -> None:
    raise _Stop


def test_a_hook_that_stops_every_call_is_not_captured_each_time() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model = ORTModule(net)
    handle = net[1].register_forward_hook(_stop)
    captures = []
    for _ in range(8):
        before = torch._dynamo.utils.counters["frames"]["total"]
        with pytest.raises(_Stop):
            model(torch.ones(2, 4))
        captures.append(torch._dynamo.utils.counters["frames"]["total"] - before)
    assert captures[0] > 0
    assert captures.count(0) >= 3, captures
    handle.remove()
    for _ in range(3):
        torch.testing.assert_close(model(torch.ones(2, 4)), net(torch.ones(2, 4)))
    assert model.report().runs_in_onnxruntime


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: self.linear(t).sin(), lambda t: t * 2, (x * 1,))


class Looping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch._higher_order_ops.while_loop import while_loop

        return (
            while_loop(lambda i, t: i < 3, lambda i, t: (i + 1, t * 2), (torch.tensor(0), x.detach()))[1] + x
        )


def _result_and_gradient(module: nn.Module, sign: float) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = torch.full((3, 2), sign, requires_grad=True)
    result = module(x)
    result.sum().backward()
    return result, x.grad


@pytest.mark.parametrize("cls", [Conditional, Looping])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_higher_order_operators(cls: type[nn.Module], sign: float) -> None:
    module = cls()
    eager = _result_and_gradient(module, sign)
    with pytest.warns(UserWarning, match="runs in PyTorch"):
        ours = _result_and_gradient(ORTModule(module), sign)
    torch.testing.assert_close(ours, eager)


class Noisy(torch.nn.Module):
    """Draws from NumPy's generator, as SpecAugment does in wav2vec 2.0."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * float(np.random.rand())


def test_numpys_generator_is_numpys() -> None:
    plain = Noisy()
    ours, x = ORTModule(plain), torch.randn(4, 3)
    results = []
    for module in (plain, ours):
        np.random.seed(7)
        results.append([module(x), module(x)])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
    assert not torch.equal(results[1][0], results[1][1])
