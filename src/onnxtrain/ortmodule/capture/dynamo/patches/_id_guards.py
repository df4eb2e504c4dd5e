"""Keeps objects alive that guards compare by id, so that no new object reuses the id.

Dynamo (PyTorch 2.13) drops a graph when an object dies whose id the graph's guards compare, but only if the object
supports weak references. An `re.Match` does not: the next match often gets the id of the previous one, and its graph.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from onnxtrain.ortmodule._torch import GuardBuilder
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide, replace

KEPT = "kept_by_onnxtrain"
"""Attribute of a guard manager: the objects whose ids it compares and that don't support weak references."""


def _keep_guarded_objects() -> Callable[[], None]:
    """Patches Dynamo so that guards on an object's id keep the object alive; returns the undo function."""
    before = GuardBuilder.id_match_unchecked

    @functools.wraps(before)
    def id_match(self: Any, guard: Any, *args: Any, **kwargs: Any) -> None:
        before(self, guard, *args, **kwargs)
        value = self.get(guard)
        try:
            weakref.ref(value)
        except TypeError:
            vars(self.guard_manager).setdefault(KEPT, []).append(value)

    return replace((GuardBuilder, "id_match_unchecked", id_match))


id_guards = ProcessWide(_keep_guarded_objects)
