"""The choices that make a random graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


class Rejected(Exception):
    """A node cannot be added: the op does not take such inputs, or its result is too large."""


class Draw:
    """Choices, all of them made by `below(count)`: an integer from 0 to count - 1.

    That is a generator of random numbers, or hypothesis, which can make a graph smaller.
    """

    def __init__(self, below: Callable[[int], int]) -> None:
        self._below = below

    def choice(self, options: Sequence[T]) -> T:
        """Returns one of the options."""
        return options[self._below(len(options))]

    def integer(self, low: int, high: int) -> int:
        """Returns an integer from `low` to `high`."""
        return low + self._below(high - low + 1)

    def chance(self, percent: int) -> bool:
        """Returns True in that many of a hundred cases."""
        return self._below(100) >= 100 - percent

    def subset(self, options: Sequence[T], least: int = 0) -> list[T]:
        """Returns some of the options, in any order."""
        picked = self.permutation(options)
        return picked[: self.integer(least, len(picked))] if len(picked) >= least else picked

    def permutation(self, options: Sequence[T]) -> list[T]:
        """Returns the options in any order."""
        rest, result = list(options), []
        while rest:
            result.append(rest.pop(self.integer(0, len(rest) - 1)))
        return result

    def rng(self) -> np.random.Generator:
        """Returns a generator of numbers."""
        return np.random.default_rng(self._below(2**16))
