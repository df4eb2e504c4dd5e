"""The cases of the lowerings at larger sizes: each axis of their tensors in turn, and numbers that are sizes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed

from onnxtrain.errors import DifferentiationError
from onnxtrain.ortmodule._exceptions import ORTModuleONNXModelException
from ortmodule.aten_case import Case, T
from ortmodule.growth import Cost, Growth, Program, eager, ours

_SMALLEST = 16
_MOST = 1_000_000
"""Elements or multiplications of the smallest of three sizes."""

_UNCHECKED = "attention"
"""Cases whose sizes eager PyTorch (2.13) doesn't compare; it reads past the end of keys that are fewer than values."""

_OF_WEIGHTS = ("lstm", "gru", "rnn")
"""As above, of weights as well, which are multiples of the width: `sized_cases.py` has them."""

_TOLERANCE = 0.3
"""An exponent is above eager's if it is larger by more than this: a factor log(n) is worth 0.2."""

Axes = frozenset[tuple[int, int]]
"""Pairs of an argument and an axis of it."""


class Growing:
    """A computation whose sizes grow: `of(n)` returns a function and its arguments at size n, `name` says what n is."""

    name: Any
    of: Callable[[int], tuple[Program, Sequence[Any]]]

    def cost(self, size: int) -> Cost:
        """Returns the cost in ONNX Runtime at a size."""
        raise NotImplementedError

    def start(self, largest: int) -> int | None:
        """Returns the size to start from, at most `largest`, so that four times of it takes a moment.

        Returns:
            The size, or None if eager PyTorch doesn't run it.
        """
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                size, cost = _SMALLEST, eager(*self.of(_SMALLEST)).work
                while size < largest:
                    before, cost = cost, eager(*self.of(2 * size)).work
                    if cost > _MOST:
                        break
                    size *= 2
                    if cost * cost / max(before, 1) > _MOST:
                        break
        # PyTorch has no common class for arguments that do not fit together.
        except Exception:
            return None
        return size

    def growths(self, start: int) -> tuple[Growth, Growth] | None:
        """Returns the growth from a size to four times of it, in ONNX Runtime and in eager PyTorch.

        Returns None if eager PyTorch does not run all of these sizes, e.g. a window longer than the tensor.
        """
        try:
            in_eager = Growth.of([eager(*self.of(size)) for size in (start, 2 * start, 4 * start)])
        # PyTorch has no common class for arguments that do not fit together.
        except Exception:
            return None
        first, last = (self.cost(size) for size in (start, 4 * start))
        # Without a size in between, an upper bound of the exponents.
        most = Growth.between(first, last)
        if not _is_above(most, in_eager):
            return most, in_eager
        return Growth.of([first, self.cost(2 * start), last]), in_eager

    def finding(self, largest: int) -> tuple[Growth, Growth] | None:
        """Returns the growth of both if ours is above eager's, else None.

        Above it is what also grows faster from eight times the size on, unless that takes too long: where another
        algorithm begins at some size, costs have a step.

        Args:
            largest: the largest size to start from.
        """
        start = self.start(largest)
        if start is None:
            return None
        try:
            found = self.growths(start)
            if found is not None and _is_above(*found):
                later = self.start(8 * largest) or start
                found = (self.growths(later) if later > start else None) or found
        except BackendCompilerFailed as error:
            # Not every op has a lowering for all sizes; PyTorch runs the others.
            if isinstance(error.inner_exception, ORTModuleONNXModelException) and "has no lowering" in str(
                error
            ):
                return None
            raise
        except DifferentiationError:
            # A rule refuses these sizes.
            return None
        return found if found is not None and _is_above(*found) else None


def _is_above(one: Growth, other: Growth) -> bool:
    """True if one growth is above another one. Linear growth is never above: each case has a larger argument."""
    return any(
        getattr(one, what) > max(getattr(other, what), 1.0) + _TOLERANCE for what in ("memory", "work")
    )


@dataclass(frozen=True)
class Grown(Growing):
    """A function of tensors, compiled for ONNX Runtime, with symbolic sizes if `dynamic`."""

    name: str
    of: Callable[[int], tuple[Program, Sequence[Any]]]
    dynamic: bool = False

    def cost(self, size: int) -> Cost:
        return ours(*self.of(size), dynamic=self.dynamic)


def grown(case: Case, dynamic: bool = False) -> Iterator[Grown]:
    """Yields a case for each axis that can be made longer, alone or with all axes of its size."""
    axes = {
        (place, axis): size
        for place, argument in enumerate(case.arguments)
        if isinstance(argument, T | torch.Tensor)
        for axis, size in enumerate(argument.shape)
        if size
    }
    tried: set[Axes] = set()
    unchecked = case.name.startswith(_UNCHECKED)
    if case.name.startswith(_OF_WEIGHTS):
        return
    for (place, axis), size in axes.items():
        together = frozenset(at for at, other in axes.items() if other == size)
        alone = frozenset([(place, axis)])
        for chosen in (together,) if unchecked else (alone, together):
            if chosen in tried:
                continue
            tried.add(chosen)
            names = "+".join(f"{place}.{axis}" for place, axis in sorted(chosen))
            candidate = Grown(f"{case.name}, {names}", _at_size(case, chosen, size), dynamic)
            if candidate.start(_SMALLEST):
                yield candidate
                break


def _at_size(case: Case, axes: Axes, size: int) -> Callable[[int], tuple[Program, Sequence[Any]]]:
    def of(target: int) -> tuple[Program, Sequence[Any]]:
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
