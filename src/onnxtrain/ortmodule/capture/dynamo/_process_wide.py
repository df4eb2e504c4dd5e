"""Changes a process-wide setting while any thread needs it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any


def replace(*replacements: tuple[Any, str, Any]) -> Callable[[], None]:
    """Sets attributes of classes or modules; returns the undo function.

    Args:
        replacements: tuples of an owner, the name of its attribute, and the new value, e.g.
            `(GuardBuilder, "ID_MATCH", guard)`.
    """
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    _set(replacements)
    return functools.partial(_set, before)


def _set(attributes: Iterable[tuple[Any, str, Any]]) -> None:
    for owner, name, value in attributes:
        setattr(owner, name, value)


class ProcessWide:
    """A process-wide change, made when the first thread enters the context, and undone when the last thread leaves it.

    If each thread saved and restored the previous state, the second of two overlapping threads would save the state
    that the first thread has changed, and restore this state at the end.

    Args:
        change: makes the change and returns the undo function.
    """

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
        self._change = change
        self._lock = threading.Lock()
        self._users = 0
        self._undo: Callable[[], None]

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Context manager that keeps the change in effect."""
        with self._lock:
            if self._users == 0:
                self._undo = self._change()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._undo()
