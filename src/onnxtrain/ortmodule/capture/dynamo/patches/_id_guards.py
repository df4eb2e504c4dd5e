"""Keep the objects alive for which alone a graph holds: another object with the same id must not take it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from onnxtrain.ortmodule._torch import GuardBuilder
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide, replace

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

    return replace((GuardBuilder, "id_match_unchecked", id_match))


guarded_objects_are_kept = ProcessWide(_keep_guarded)
"""Keeps objects alive whose ids guards compare, while it is open."""
