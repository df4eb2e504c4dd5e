"""Change a setting of the whole process while code of one or several threads needs it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any


def replace(*replacements: tuple[Any, str, Any]) -> Callable[[], None]:
    """Sets attributes of classes or modules, and returns the function that sets them as they were.

    Args:
        replacements: an owner, the name of its attribute, and the new value, e.g. `(GuardBuilder, "ID_MATCH", guard)`.
    """
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    _set(replacements)
    return functools.partial(_set, before)


def _set(attributes: Iterable[tuple[Any, str, Any]]) -> None:
    for owner, name, value in attributes:
        setattr(owner, name, value)


class ProcessWide:
    """A change of the process that the first thread to need it makes, and the last one takes back.

    If each thread put back what it had found, the second of two that overlap would leave the change of the first for
    good.

    Args:
        change: makes the change and returns a function that takes it back.
    """

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
        self._change = change
        self._lock = threading.Lock()
        self._users = 0
        self._take_back: Callable[[], None]

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Keeps the change while the context is open."""
        with self._lock:
            if self._users == 0:
                self._take_back = self._change()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._take_back()
