"""float16 and bfloat16 on the CPU: rounded after each op as PyTorch's kernels do, with numbers that are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ortmodule.eager import strict

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "chain": lambda x: (x + x).sin().float(),
    "sum": lambda x: (x * x + x).sum(-1),
    "overflow of float16": lambda x: (x * 2**14 * 8).float().clamp(max=1e9),
    "product with a number": lambda x: x * 1.1,
    "sum with a number": lambda x: 0.37 + x,
    "difference from a number": lambda x: 1.7 - x,
    "division by a number": lambda x: (x / 1.3) * 3,
    "scaled addend": lambda x: torch.add(x, x.sin(), alpha=0.3),
}


class Applied(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_rounded_as_in_eager_pytorch(
    function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    x = torch.randn(16, 9)
    steps = []
    for run in (function, strict(Applied(function))):
        leaf = x.to(dtype).requires_grad_()
        out = run(leaf)
        out.float().sum().backward()
        steps.append((out.detach(), leaf.grad))
    for got, want in zip(*steps, strict=True):
        # The same roundings, so the same numbers, but for sums in another order.
        assert (got == want).float().mean() > 0.9
        torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
