"""One row of the table of lowering tests: a function of tensors, and how to make them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class T:
    """A float32 tensor, sampled uniformly from [low, high]; it requires a gradient unless `grad=False`."""

    shape: tuple[int, ...]
    low: float
    high: float
    grad: bool

    def __init__(self, *shape: int, low: float = -2.0, high: float = 2.0, grad: bool = True) -> None:
        for name, value in (("shape", shape), ("low", low), ("high", high), ("grad", grad)):
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Case:
    """A function, and its arguments: `T`s, tensors (chosen values), or Python values.

    Attributes:
        name: unique.
        fn: returns a tensor or a tuple of tensors and Python values.
        random: whether it draws random numbers: both sides then start from the same seed.
        dynamic: whether it also runs with symbolic sizes, or of which arguments.
        tolerance: norm-relative, of outputs and gradients against float64.
    """

    name: str
    fn: Callable[..., Any]
    arguments: tuple[Any, ...]
    random: bool = False
    dynamic: bool | tuple[int, ...] = True
    tolerance: float = 2e-5

    def sample(self, dtype: torch.dtype) -> list[Any]:
        # The same numbers on every device.
        device = torch.get_default_device()
        generator = torch.Generator("cpu").manual_seed(zlib.crc32(self.name.encode()))
        result = []
        for argument in self.arguments:
            if isinstance(argument, T):
                numbers = torch.rand(
                    argument.shape, generator=generator, dtype=torch.float32, device="cpu"
                ).to(device)
                value = (argument.low + (argument.high - argument.low) * numbers).to(dtype)
                result.append(value.requires_grad_(argument.grad))
            elif isinstance(argument, torch.Tensor):
                value = argument.detach().clone().to(device)
                value = value.to(dtype) if value.is_floating_point() else value
                result.append(value.requires_grad_(argument.requires_grad))
            else:
                result.append(argument)
        return result
