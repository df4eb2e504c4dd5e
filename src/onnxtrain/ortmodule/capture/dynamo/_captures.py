"""Frees the graphs of a deleted model, which Dynamo would keep for the lifetime of the process."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

from onnxtrain.ortmodule._torch import (
    DeletedGuardManagerWrapper,
    c_eval_frame,
    eval_frame,
)
from onnxtrain.ortmodule.capture.dynamo.patches._id_guards import KEPT


class Captures:
    """The code objects of the functions that were captured for one backend.

    Args:
        backend: the backend, which belongs to a single ORTModule.
    """

    # Dynamo (PyTorch 2.13) keeps graphs in the code object of the captured function. The code of a PyTorch layer, or of
    # a method of a class, lives as long as the process. Unless its graphs are released, every model stays in memory.

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend = backend
        # Keyed by id, because code objects of different functions may compare equal.
        self._codes: dict[int, weakref.ref[CodeType]] = {}
        # `torch._dynamo.optimize` has added the backend to this table, which would keep it and the model's report alive
        # forever. Only `torch._dynamo.reset` reads the table, for backends with a method `reset`.
        eval_frame.cached_backends.pop(id(backend), None)

    def add(self, code: CodeType) -> None:
        """Records the code object of a function that Dynamo captures."""
        self._codes[id(code)] = weakref.ref(code)

    def has_graphs(self, code: CodeType) -> bool:
        """True if Dynamo has a valid graph of a function, compiled by this backend."""
        return any(entry.backend is self._backend for entry in c_eval_frame._debug_get_cache_entry_list(code))

    def release(self) -> None:
        """Frees the graphs of the backend. Its functions may be captured again."""
        for reference in self._codes.values():
            code = reference()
            if code is not None:
                self._release(code)
        self._codes.clear()

    def _release(self, code: CodeType) -> None:
        for entry in c_eval_frame._debug_get_cache_entry_list(code):
            guards: Any = entry.guard_manager
            # `extra_state` is None if Dynamo has dropped the graph already.
            if entry.backend is not self._backend or guards.extra_state is None:
                continue
            deleted = DeletedGuardManagerWrapper("the ORTModule that it was captured for is gone")
            guards.extra_state.invalidate(entry, deleted)
            # Finalizers of functions and types that live on keep the guard manager alive (guards.py,
            # `CheckFunctionManager`), so its references to the graph are removed.
            vars(guards).update(vars(deleted))
            vars(guards).pop(KEPT, None)
