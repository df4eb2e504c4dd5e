"""The process's own random numbers (random, numpy.random, torch) while a user's code prepares batches.

Augmentation mostly draws from these. Seeded for each batch, and put back afterwards, they make a resumed run draw what
an uninterrupted one would have drawn, and leave the program's own numbers alone.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


def _torch() -> Any:
    """PyTorch, if the program has imported it."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "default_generator") else None


def _capture() -> tuple[Any, Any, Any]:
    torch = _torch()
    return (
        random.getstate(),
        np.random.get_state(),
        None if torch is None else torch.default_generator.get_state(),
    )


def _restore(states: tuple[Any, Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch = _torch()
    if torch is not None and states[2] is not None:
        torch.default_generator.set_state(states[2])


def _seed(key: tuple[int, ...]) -> None:
    number = int(np.random.SeedSequence(key).generate_state(1)[0])
    random.seed(number)
    np.random.seed(number)
    torch = _torch()
    if torch is not None:
        torch.default_generator.manual_seed(number)


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Gives the code within random numbers that depend on nothing but the key."""
    before = _capture()
    _seed(key)
    try:
        yield
    finally:
        _restore(before)


class OwnNumbers:
    """Random numbers of their own for code that runs bit by bit: those of a key, going on at each entry."""

    def __init__(self, *key: int) -> None:
        self._key = key
        self._inner: tuple[Any, Any, Any] | None = None
        self._outer: tuple[Any, Any, Any] | None = None

    def __enter__(self) -> None:
        self._outer = _capture()
        if self._inner is None:
            _seed(self._key)
        else:
            _restore(self._inner)

    def __exit__(self, *error: object) -> None:
        self._inner = _capture()
        assert self._outer is not None
        _restore(self._outer)
