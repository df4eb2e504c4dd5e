"""The cases of the lowerings at larger sizes: each axis of their tensors in turn, and numbers that are sizes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ortmodule.aten_case import Case, T
from ortmodule.growth import Growth, eager, eager_work, ours

_SMALLEST = 16
_UNCHECKED = "attention"
"""Cases whose sizes eager PyTorch (2.13) doesn't compare: it reads past the end of keys that are fewer than values."""
_MOST = 1_000_000
"""Elements or multiplications of the smallest of three sizes."""

Axes = frozenset[tuple[int, int]]
"""Pairs of an argument and an axis of it."""


@dataclass(frozen=True)
class Grown:
    """What grows: `of(n)` returns a function and its arguments at size n."""

    name: str
    of: Callable[[int], tuple[Callable[..., Any], Sequence[Any]]]

    def start(self, largest: int) -> int | None:
        """Returns the size to start from, at most `largest`, so that four times of it takes a moment.

        Returns:
            The size, or None if eager PyTorch doesn't run it.
        """
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                size, cost = _SMALLEST, eager_work(*self.of(_SMALLEST))
                while size < largest:
                    before, cost = cost, eager_work(*self.of(2 * size))
                    if cost > _MOST:
                        break
                    size *= 2
                    if cost * cost / max(before, 1) > _MOST:
                        break
        # PyTorch has no common class for arguments that do not fit together.
        except Exception:
            return None
        return size

    def growths(self, start: int, dynamic: bool = False) -> tuple[Growth, Growth]:
        """Returns the growth from a size to four times of it, in ONNX Runtime and in eager PyTorch."""
        sizes = (start, 2 * start, 4 * start)
        in_onnxruntime = Growth.of([ours(*self.of(size), dynamic=dynamic) for size in sizes])
        return in_onnxruntime, Growth.of([eager(*self.of(size)) for size in sizes])


def grown(case: Case) -> Iterator[Grown]:
    """Yields a case for each axis that can be made longer, alone or with all axes of its size."""
    axes = {
        (place, axis): size
        for place, argument in enumerate(case.arguments)
        if isinstance(argument, T | torch.Tensor)
        for axis, size in enumerate(argument.shape)
        if size
    }
    tried: set[Axes] = set()
    for (place, axis), size in axes.items():
        together = frozenset(at for at, other in axes.items() if other == size)
        alone = frozenset([(place, axis)])
        for chosen in (together,) if case.name.startswith(_UNCHECKED) else (alone, together):
            if chosen in tried:
                continue
            tried.add(chosen)
            names = "+".join(f"{place}.{axis}" for place, axis in sorted(chosen))
            candidate = Grown(f"{case.name}, {names}", _at_size(case, chosen, size))
            if candidate.start(_SMALLEST):
                yield candidate
                break


def _at_size(case: Case, axes: Axes, size: int) -> Callable[[int], tuple[Callable[..., Any], Sequence[Any]]]:
    def of(target: int) -> tuple[Callable[..., Any], Sequence[Any]]:
        factor = max(1, target // size)
        arguments = []
        for place, argument in enumerate(case.arguments):
            grows = [axis for at, axis in axes if at == place]
            if isinstance(argument, T):
                shape = [n * (factor if axis in grows else 1) for axis, n in enumerate(argument.shape)]
                argument = T(*shape, low=argument.low, high=argument.high, grad=argument.grad)
            elif isinstance(argument, torch.Tensor):
                longer = argument.detach().repeat(
                    [factor if axis in grows else 1 for axis in range(argument.dim())]
                )
                argument = longer.requires_grad_(argument.requires_grad)
            arguments.append(argument)
        return case.fn, replace(case, arguments=tuple(arguments)).sample(torch.float32)

    return of
