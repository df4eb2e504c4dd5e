"""Free the graphs of a model when it is dropped: Dynamo would keep them as long as the process lives."""

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
        backend: the backend, which one ORTModule alone uses.
    """

    # Dynamo (PyTorch 2.13) keeps graphs in the code object of the captured function. That of a layer of PyTorch, or of
    # a method of a class, lives as long as the process: without a release every model that was ever made stays in
    # memory.

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend = backend
        # By id: code objects of several functions may compare equal.
        self._codes: dict[int, weakref.ref[CodeType]] = {}
        # `torch._dynamo.optimize` has put the backend into this table, which would hold it and the model's report for
        # ever. Only `torch._dynamo.reset` reads the table, for backends with a method `reset`.
        eval_frame.cached_backends.pop(id(backend), None)

    def add(self, code: CodeType) -> None:
        """Notes that Dynamo captures the function of a code object."""
        self._codes[id(code)] = weakref.ref(code)

    def release(self) -> None:
        """Drops the graphs of the backend; the functions may be captured again."""
        for reference in self._codes.values():
            code = reference()
            if code is not None:
                self._release(code)
        self._codes.clear()

    def _release(self, code: CodeType) -> None:
        for entry in c_eval_frame._debug_get_cache_entry_list(code):
            guards: Any = entry.guard_manager
            # `extra_state` is None where Dynamo has dropped the graph already.
            if entry.backend is not self._backend or guards.extra_state is None:
                continue
            deleted = DeletedGuardManagerWrapper("the ORTModule that it was captured for is gone")
            guards.extra_state.invalidate(entry, deleted)
            # Finalizers of functions and types, which live on, hold the guard manager (guards.py,
            # `CheckFunctionManager`): it must let go of the graph.
            vars(guards).update(vars(deleted))
            vars(guards).pop(KEPT, None)
