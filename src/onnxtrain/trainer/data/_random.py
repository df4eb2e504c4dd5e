"""Seeds the process's random numbers (random, numpy.random, torch) while users' code prepares batches.

Most augmentation draws from these generators. Seeding them for each batch, and restoring them afterwards, makes resumed
runs reproducible and does not disturb the program's own random numbers. Trainers in several threads take turns, so that
each draws the same numbers as it would alone.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from onnxtrain._printable import get_logger


def _torch() -> Any:
    """Returns the module `torch` if the program has imported it; None otherwise."""
    torch = sys.modules.get("torch")
    # During its import, torch is in sys.modules without its attributes.
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
    # All three accept 32-bit seeds.
    number = int(np.random.SeedSequence(key).generate_state(1)[0])
    random.seed(number)
    np.random.seed(number)
    torch = _torch()
    if torch is not None:
        torch.default_generator.manual_seed(number)


# The generators belong to the process: code of other threads waits while one trainer's code draws.
_drawing = threading.RLock()
# False after a timeout: the thread that draws may itself be waiting for the other.
_take_turns = True
# Seconds to wait for another thread's code, e.g. for a slow loader.
_PATIENCE = 60.0

_log = get_logger()


def _renew_lock() -> None:
    """Replaces the lock in a forked process, where the thread that may hold it no longer exists."""
    global _drawing
    _drawing = threading.RLock()


# Windows has no fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


@contextmanager
def _taking_turns() -> Iterator[None]:
    """Context manager for code that draws seeded random numbers: only one thread at a time may enter."""
    global _take_turns
    lock = _drawing if _take_turns else None
    if lock is not None and not lock.acquire(timeout=_PATIENCE):
        lock, _take_turns = None, False
        _log.warning(
            "Two trainers prepare batches at the same time, and one has waited %g s for the other: from "
            "now on neither waits, so random numbers from random, numpy.random and torch are not "
            "reproducible. Draw from the Generator that a transform receives as its third argument, or "
            "from your own.",
            _PATIENCE,
        )
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Context manager that seeds the process's random generators with a key, and restores them at the end."""
    with _taking_turns():
        before = _capture()
        _seed(key)
        try:
            yield
        finally:
            _restore(before)


class OwnNumbers:
    """Random state for code that runs intermittently, e.g. an iterator of batches: seeded once, then continued.

    An iterator only runs while the next batch is fetched; in between, the program draws its own random numbers.
    """

    def __init__(self, *key: int) -> None:
        self._key = key
        self._inner: tuple[Any, Any, Any] | None = None

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Context manager in which the process's generators continue from this state; they are restored at the end."""
        with _taking_turns():
            outer = _capture()
            if self._inner is None:
                _seed(self._key)
            else:
                _restore(self._inner)
            try:
                yield
            finally:
                self._inner = _capture()
                _restore(outer)
