"""`torch.utils.checkpoint`: regions are computed again in backward, with the same numbers."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from onnxtrain.ortmodule import ORTModule
from ortmodule.eager import Of, compare, compare_steps

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


class Deep(nn.Module):
    def __init__(self, checkpointed: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(dropout), nn.Linear(64, 8))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x))
        return x


def _saved(result: torch.Tensor, module: nn.Module) -> int:
    """Numbers that backward keeps beside the parameters."""
    own = {parameter.data_ptr() for parameter in module.parameters()}
    saved: Any = result.grad_fn.saved_tensors  # type: ignore[union-attr]
    tensors = sum(tensor.numel() for tensor in saved if tensor.data_ptr() not in own)
    residuals = result.grad_fn.kept.residuals  # type: ignore[union-attr]
    return tensors + sum(math.prod(value.shape()) for value in residuals)


def test_nothing_inside_of_a_region_is_kept() -> None:
    x = torch.randn(32, 8)
    saved = [_saved(ORTModule(module)(x), module) for module in (Deep(False), Deep(True))]
    assert saved[0] >= 4 * 32 * 64
    assert saved[1] <= 6 * 32 * 8


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients(dropout: float) -> None:
    ours = compare_steps(Deep(True, dropout), (3, 8), (5, 8), (2, 8))
    assert ours.report().runs_in_onnxruntime


class Mixed(nn.Module):
    """A region with several results, in a region, with no_grad in it, and one whose result nothing follows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()

    def outer(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            scale = x.max(1).values[:, None]
        return checkpoint(self.inner, x, use_reentrant=False) * scale, x.sin(), 2

    def forward(self, x: torch.Tensor) -> Any:
        a, b, c = checkpoint(self.outer, x, use_reentrant=False)
        return a + b * c, checkpoint(self.inner, a, use_reentrant=False)


def test_regions_in_regions() -> None:
    ours = compare_steps(Mixed(), (3, 4), loss=lambda out: out[0].square().sum() + out[1].sum())
    assert ours.report().runs_in_onnxruntime


def normalised() -> Of:
    """Writes to a vector that its weight is computed from: the graph is rehearsed with PyTorch's autograd."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    return Of(lambda m, x: m.layer(x).sin(), layer=layer)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_an_ortmodule(reentrant: bool) -> None:
    plain = normalised().double()
    model = ORTModule(copy.deepcopy(plain))
    x = torch.randn(5, 4, dtype=torch.float64)
    for step in range(2):  # the first call compiles
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        checkpoint(model, ours, use_reentrant=reentrant).square().sum().backward()
        checkpoint(plain, theirs, use_reentrant=reentrant).square().sum().backward()
        # Without reentry the second run ends before the ORTModule writes the vector, and after eager PyTorch does.
        if reentrant or step == 0:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


def test_saved_tensors_hooks_see_no_compilation() -> None:
    seen: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.shape)
        return tensor

    model = ORTModule(normalised())
    counts = []
    for _ in range(3):
        seen.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(5, 4, requires_grad=True))
        counts.append(len(seen))
    assert counts[0] == counts[1] == counts[2] > 0


def drawn(t: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(t.tanh() * u, 0.3)


def in_pytorch_as_a_whole(module: Of, x: torch.Tensor) -> torch.Tensor:
    """Writes past autograd to what LayerNorm has saved, which ORTModule leaves to PyTorch."""
    with torch.no_grad():
        copied = x.clone()
    module.norm(copied)
    copied.data.mul_(0.5)
    return checkpoint(drawn, copied, x * 2, use_reentrant=False)


def in_pytorch_in_part(module: Of, x: torch.Tensor) -> torch.Tensor:
    def counted(t: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return drawn(t, u) * torch.poisson(u.detach().abs()) + drawn(u, t)

    return checkpoint(counted, x, module.norm(x), use_reentrant=False)


def in_regions_of_regions(module: Of, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(
        lambda t: checkpoint(drawn, t, in_pytorch_as_a_whole(module, t), use_reentrant=False),
        module.norm(x),
        use_reentrant=False,
    )


@pytest.mark.parametrize("forward", [in_pytorch_as_a_whole, in_pytorch_in_part, in_regions_of_regions])
def test_regions_that_pytorch_runs_draw_the_same_numbers_again(forward: Any) -> None:
    compare_steps(Of(forward, norm=nn.LayerNorm(8)), (9, 8), warns="PyTorch")


def test_second_derivatives_of_regions_draw_the_same_numbers_again() -> None:
    start = torch.randn(9, 8)

    def program(module: nn.Module) -> Any:
        x = start.clone().requires_grad_()
        torch.manual_seed(3)
        (first,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
        return first.detach(), x.grad, module.norm.weight.grad

    plain = Of(lambda m, x: checkpoint(drawn, x, m.norm(x), use_reentrant=False), norm=nn.LayerNorm(8))
    compare(plain, program)
