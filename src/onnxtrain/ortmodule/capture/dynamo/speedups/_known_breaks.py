"""End a graph before a call that ended an earlier graph, without tracing what comes before the end once more.

Dynamo (PyTorch 2.13) captures a function together with those that it calls. Where a graph ends in one of these, Dynamo
drops what it has captured, ends the graph before the outermost call, and begins again with the function that is called.
Of a function that is five calls deep it would capture the beginning five times.
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
    """Why a graph ended in a called function, and the stack there, in Dynamo's words."""

    message: str
    kind: str
    stack: Any


class KnownBreaks:
    """Notes in which calls graphs have ended."""

    def __init__(self) -> None:
        # By code of the calling function: by offset of the call in it and id of the called code. No code is kept alive:
        # with it Dynamo would keep the graphs of the function.
        self._breaks: WeakKeyDictionary[CodeType, dict[tuple[int, int], _Break]] = WeakKeyDictionary()

    def add(self, caller: CodeType, offset: int, called: CodeType, found: _Break) -> None:
        """Notes that a graph has ended in a call."""
        self._breaks.setdefault(caller, {})[offset, id(called)] = found

    def find(self, caller: CodeType, offset: int, called: CodeType) -> _Break | None:
        """Returns why a graph ended in a call; None if none did."""
        return self._breaks.get(caller, {}).get((offset, id(called)))

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Forgets what a capture notes that raises: the next attempt, with other settings, may go on there."""
        before = {code: dict(breaks) for code, breaks in self._breaks.items()}
        try:
            yield
        except BaseException:
            self._breaks.clear()
            self._breaks.update(before)
            raise


_KNOWN: ContextVar[KnownBreaks | None] = ContextVar("onnxtrain known breaks", default=None)


def _remember() -> Callable[[], None]:
    """Has Dynamo note in which calls graphs end; returns the function that takes that back."""
    before = InliningInstructionTranslator.inline_call_

    def inline_call_(self: Any) -> Any:
        known, caller = _KNOWN.get(), self.parent
        if known is None:
            return before(self)
        call = caller.f_code, caller.current_instruction.offset, self.f_code
        # Only calls in the captured function itself can end a graph.
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


_remembering = ProcessWide(_remember)


@contextlib.contextmanager
def ending_before(known: KnownBreaks) -> Iterator[None]:
    """Ends graphs before the calls in `known`, and notes there in which calls others end, while it is open."""
    with _remembering():
        token = _KNOWN.set(known)
        try:
            yield
        finally:
            _KNOWN.reset(token)
