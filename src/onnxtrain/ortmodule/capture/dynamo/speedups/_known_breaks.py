"""Breaks a graph before a call that broke an earlier graph, without tracing the called function up to the break.

Dynamo (PyTorch 2.13) inlines the functions that a captured function calls. At a graph break in one of these, Dynamo
discards the trace, ends the graph before the outermost call, and starts again with the called function. The beginning
of a function at a depth of five calls would be traced five times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import CodeType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from onnxtrain.ortmodule._torch import InliningInstructionTranslator, Unsupported
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide, replace


class _Break(NamedTuple):
    """A graph break in a called function: its message, kind and stack, as reported by Dynamo."""

    message: str
    kind: str
    stack: Any


class KnownBreaks:
    """Records the function calls that have broken graphs."""

    def __init__(self) -> None:
        # By code of the caller, then by the offset of the call in it and the id of the called code. No code object is
        # kept alive: it would keep the graphs of its function alive.
        self._breaks: WeakKeyDictionary[CodeType, dict[tuple[int, int], _Break]] = WeakKeyDictionary()

    def add(self, caller: CodeType, offset: int, called: CodeType, found: _Break) -> None:
        """Records a graph break in the call to `called` at a bytecode offset of `caller`."""
        self._breaks.setdefault(caller, {})[offset, id(called)] = found

    def find(self, caller: CodeType, offset: int, called: CodeType) -> _Break | None:
        """Returns the graph break recorded for the call to `called` at a bytecode offset of `caller`, or None."""
        return self._breaks.get(caller, {}).get((offset, id(called)))

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Context manager for one attempt to capture. If it raises, the graph breaks recorded in it are dropped."""
        before = {code: dict(breaks) for code, breaks in self._breaks.items()}
        try:
            yield
        except BaseException:
            self._breaks.clear()
            self._breaks.update(before)
            raise


_KNOWN: ContextVar[KnownBreaks | None] = ContextVar("onnxtrain known breaks", default=None)


def _record_breaks() -> Callable[[], None]:
    """Makes Dynamo remember the calls at which graphs break, and break there immediately; returns the undo function."""
    before = InliningInstructionTranslator.inline_call_

    def inline_call_(self: Any) -> Any:
        known, caller = _KNOWN.get(), self.parent
        if known is None:
            return before(self)
        call = caller.f_code, caller.current_instruction.offset, self.f_code
        # A graph can only end in the captured function itself, not in a function that it calls.
        is_outermost = caller.parent is None
        if is_outermost and (found := known.find(*call)):
            raise Unsupported(found.message, found.kind, real_stack=found.stack)
        try:
            return before(self)
        except Unsupported as error:
            if not is_outermost:
                known.add(*call, _Break(error.msg, error.gb_type or "", error.real_stack))
            raise

    return replace((InliningInstructionTranslator, "inline_call_", inline_call_))


_recording = ProcessWide(_record_breaks)


@contextlib.contextmanager
def breaking_early(known: KnownBreaks) -> Iterator[None]:
    """Context manager that makes Dynamo break graphs before the calls in `known`, and add further breaks to it."""
    with _recording():
        token = _KNOWN.set(known)
        try:
            yield
        finally:
            _KNOWN.reset(token)
