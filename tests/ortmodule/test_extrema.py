"""Maxima and minima along an axis, by kernels and without: values, indices and gradients are eager PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from onnxtrain.ortmodule import ORTModule

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]

INPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one row": lambda x: x[:77],
    "rows": lambda x: x[: 5 * 7 * 40].view(5, 7, 40),
    "columns": lambda x: x[: 3 * 33 * 50].view(3, 33, 50),
    "transposed": lambda x: x[: 20 * 3 * 9].view(20, 3, 9).transpose(0, 2),
    "strided": lambda x: x[: 50 * 30].view(50, 30)[::2, 1::3],
    "expanded": lambda x: x[:6].view(6, 1).expand(6, 19),
    "sizes of one": lambda x: x[:9].view(1, 9, 1),
    "no rows": lambda x: x[:0].view(0, 5),
}
RARE = (math.nan, math.inf, -math.inf, -0.0)


class Extrema(nn.Module):
    """Returns all maxima and minima, and their indices, of each tensor along each axis."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: list[torch.Tensor] = []
        for x in tensors:
            for dim in range(x.dim()):
                if not x.size(dim):
                    continue
                found += [*x.max(dim), *torch.min(x, dim - x.dim(), keepdim=True)]
                found += [x.argmax(dim, keepdim=True), x.argmin(dim)]
            if x.numel():
                found += [x.argmax(), x.argmin(keepdim=True)]
        return tuple(found)


def _inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """Numbers with many ties; a sixth of the tensors' elements are NaN, infinite or -0."""
    rng = np.random.default_rng(0)
    flat = rng.integers(-4, 5, 5000).astype(np.float64)
    flat[::6] = rng.choice(RARE, len(flat[::6]))
    tensors = [view(torch.from_numpy(flat).to(dtype, copy=True)) for view in INPUTS.values()]
    return [x.detach().requires_grad_() for x in tensors]


def _run(net: nn.Module, dtype: torch.dtype) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
    inputs = _inputs(dtype)
    found = net(*inputs)
    values = [y for y in found if y.is_floating_point()]
    # Sums of small integers are exact in any order.
    cts = [torch.arange(y.numel()).remainder(7).view(y.shape).to(y) for y in values]
    return found, list(torch.autograd.grad(values, inputs, cts))


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_extrema(dtype: torch.dtype, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXTRAIN_KERNELS", kernels)
    ours = ORTModule(Extrema())
    (found, gradients), (expected, wanted) = _run(ours, dtype), _run(Extrema(), dtype)
    assert ours.report().runs_in_onnxruntime
    for actual, reference in zip((*found, *gradients), (*expected, *wanted), strict=True):
        torch.testing.assert_close(actual, reference, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(actual.signbit(), reference.signbit())


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_of_any_number_of_rows(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXTRAIN_KERNELS", kernels)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, 12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).view(len(x), 3, 4).max(1).values

    eager, ours = Net(), ORTModule(Net())
    for rows in (5, 3, 8, 1):
        x = torch.randn(rows, 12)
        for net in (eager, ours):
            net.zero_grad()
            net(x).square().sum().backward()
        torch.testing.assert_close(ours.weight.grad, eager.weight.grad)
    assert ours.report().runs_in_onnxruntime
