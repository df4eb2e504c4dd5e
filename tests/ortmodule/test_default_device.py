"""Modules whose tensors are not on PyTorch's default device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ortmodule.eager import Of, compare_steps, strict

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _elsewhere() -> Iterator[None]:
    torch._dynamo.reset()
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_constants_are_computed_on_the_cpu() -> None:
    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(4, device="cpu") + torch.linspace(0, 1, 4, device="cpu").roll(1)

    compare_steps(Of(forward), torch.ones(3, 4, device="cpu"), wrap=strict)


def test_a_batch_without_elements() -> None:
    compare_steps(nn.Linear(4, 2, device="cpu"), torch.ones(0, 4, device="cpu"), wrap=strict)
