"""Graphs that hold for one object only: keep the object, and stop capturing where each call brings another one."""

from __future__ import annotations

import functools
import random
import re
import weakref
from collections.abc import Callable, Mapping
from types import BuiltinMethodType, CodeType, ModuleType
from typing import Any

import torch

from onnxtrain.ortmodule._torch import GuardBuilder
from onnxtrain.ortmodule.capture._process_wide import ProcessWide

KEPT = "kept_by_onnxtrain"
"""Attribute of a guard manager: the objects whose ids it compares and that cannot be referred to weakly."""


def _keep_guarded() -> Callable[[], None]:
    """Has guards of an object's id keep the object alive; returns the function that takes that back."""
    before = GuardBuilder.id_match_unchecked

    # Dynamo (PyTorch 2.13) drops a graph when the object dies whose id it compares, if there can be a weak reference.
    # Of `re.Match` there is none: the next match often gets the id of the one before, and with it its graph.
    @functools.wraps(before)
    def id_match(self: Any, guard: Any, *args: Any, **kwargs: Any) -> None:
        before(self, guard, *args, **kwargs)
        value = self.get(guard)
        try:
            weakref.ref(value)
        except TypeError:
            vars(self.guard_manager).setdefault(KEPT, []).append(value)

    GuardBuilder.id_match_unchecked = id_match  # type: ignore[method-assign]

    def put_back() -> None:
        GuardBuilder.id_match_unchecked = before  # type: ignore[method-assign]

    return put_back


guarded_objects_are_kept = ProcessWide(_keep_guarded)
"""Keeps objects alive whose ids guards compare, while it is open."""


_MOST = 8
"""Captures of one function for such objects, as many as Dynamo makes by default for any reason."""


class PassingObjects:
    """Counts captures of functions that get a new object in each call, by whose id Dynamo (PyTorch 2.13) guards.

    E.g. `append = results.append` before a graph break: the rest of the function gets the method of another list in
    each call, and would be captured each time.
    """

    def __init__(self) -> None:
        self._captures: weakref.WeakKeyDictionary[CodeType, int] = weakref.WeakKeyDictionary()

    def are_too_many(self, code: CodeType, variables: Mapping[str, Any]) -> bool:
        """Notes that a function is about to be captured, and says if Python is to run it instead.

        Args:
            code: code of the function.
            variables: its local variables at the beginning.
        """
        if not any(map(_is_passing, variables.values())):
            return False
        count = self._captures[code] = self._captures.get(code, 0) + 1
        return count > _MOST


def _is_passing(value: Any) -> bool:
    """Tells whether Dynamo guards by the id of a value that usually lives no longer than the call."""
    if isinstance(value, BuiltinMethodType):
        owner = value.__self__
        # Functions of classes and modules live on, those of pybind11 too. Dynamo has other guards for the others.
        is_method = hasattr(type(owner), value.__name__) and not isinstance(owner, type | ModuleType)
        return is_method and not isinstance(owner, torch.Tensor | random.Random)
    return isinstance(value, re.Match)
