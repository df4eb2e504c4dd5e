"""Seeds the process's random numbers (random, numpy.random, torch) while a user's code prepares batches.

Augmentation mostly draws from these generators. Seeding them for each batch, and restoring them afterwards, lets a
resumed run draw the numbers of an uninterrupted one, and does not disturb the program's own numbers.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


def _torch() -> Any:
    """Returns PyTorch if the program has imported it, else None."""
    torch = sys.modules.get("torch")
    # While torch is being imported, it is in sys.modules without its attributes.
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
    # random, numpy and torch take seeds of different sizes; 32 bits suit all of them.
    number = int(np.random.SeedSequence(key).generate_state(1)[0])
    random.seed(number)
    np.random.seed(number)
    torch = _torch()
    if torch is not None:
        torch.default_generator.manual_seed(number)


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Seeds the random numbers of the block by a key, and restores the generators afterwards."""
    before = _capture()
    _seed(key)
    try:
        yield
    finally:
        _restore(before)


class OwnNumbers:
    """Random numbers for code that runs piece by piece: seeded at the first entry, continued at each further one.

    An iterator of batches runs only while the next batch is drawn; in between the program draws numbers of its
    own.
    """

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
