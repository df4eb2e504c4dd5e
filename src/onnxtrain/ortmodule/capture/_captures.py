"""What Dynamo keeps of a captured function, and its release when the function is dropped."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from onnxtrain.ortmodule._torch import (
    DeletedGuardManagerWrapper,
    c_eval_frame,
    eval_frame,
    get_metrics_context,
)


class Captures:
    """The code objects with graphs of one backend, whose graphs Dynamo is told to drop with :meth:`release`.

    Dynamo (PyTorch 2.13) keeps graphs in the code object of the function that was captured. For a layer of PyTorch, or
    a class of the user's, that object lives as long as the process, and so did the graphs of every model.

    Args:
        backend: what Dynamo calls to compile a graph; of one ORTModule alone.
    """

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend = backend
        self._codes: dict[int, weakref.ref[CodeType]] = {}  # by id: equal code objects are several functions
        # Only `torch._dynamo.reset` reads this table, for backends with a method `reset`. It would hold the backend
        # and with it the model's report for ever.
        eval_frame.cached_backends.pop(id(backend), None)

    def add(self, code: CodeType) -> None:
        """Notes that Dynamo captures a function."""
        self._codes[id(code)] = weakref.ref(code)

    def release(self) -> None:
        """Drops the graphs; the functions may be captured again, by this backend or by others."""
        for reference in self._codes.values():
            code = reference()
            if code is not None:
                self._release(code)
        self._codes.clear()

    def _release(self, code: CodeType) -> None:
        for entry in c_eval_frame._debug_get_cache_entry_list(code):
            guards: Any = entry.guard_manager
            if (
                entry.backend is not self._backend or guards.extra_state is None
            ):  # another's, or dropped by Dynamo
                continue
            deleted = DeletedGuardManagerWrapper("the ORTModule that it was captured for is gone")
            guards.extra_state.invalidate(entry, deleted)
            # Finalizers of functions and types, which live on, hold the object (guards.py, `CheckFunctionManager`).
            vars(guards).update(vars(deleted))


@contextlib.contextmanager
def without_tracebacks_in_metrics() -> Iterator[None]:
    """Drops the tracebacks that Dynamo notes for its metrics, once the capture is over.

    Dynamo (PyTorch 2.13) keeps one for each metric that was ever set in the thread (`MetricsContext._edits`), for the
    message of an error within one capture. Each holds the code objects on the stack: after a graph break, the code that
    Dynamo made of the function's beginning, and with it the graph.
    """
    try:
        yield
    finally:
        metrics = get_metrics_context()
        if not metrics.in_progress():
            metrics._edits.clear()
