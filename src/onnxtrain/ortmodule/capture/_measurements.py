"""Leave out what Dynamo measures and looks up in each capture, and nobody reads."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable
from traceback import FrameSummary, StackSummary
from types import FrameType
from typing import Any

from onnxtrain.ortmodule._torch import dynamo_exceptions, dynamo_guards
from onnxtrain.ortmodule.capture._process_wide import ProcessWide

_MEASURE = "profile_guard_manager"
_STACK = "_extract_stack_with_positions"


def _leave_out() -> Callable[[], None]:
    """Replaces two functions of Dynamo; returns the function that takes that back."""
    # Dynamo (PyTorch 2.13) empties the caches of the processor to measure its guards, 17 ms for each graph.
    measure = getattr(dynamo_guards, _MEASURE, None)
    # And at each end of a graph it looks up the columns of all frames on the stack, 6 ms, to drop all but the first.
    stack = getattr(dynamo_exceptions, _STACK, None)

    def measured_for_a_log(*args: Any) -> float:
        is_read = dynamo_guards.guards_log.isEnabledFor(logging.DEBUG)
        return float(measure(*args)) if measure is not None and is_read else 0.0

    if measure is not None:
        setattr(dynamo_guards, _MEASURE, measured_for_a_log)
    if stack is not None:
        setattr(dynamo_exceptions, _STACK, _stack_up_to_dynamo)

    def put_back() -> None:
        if measure is not None:
            setattr(dynamo_guards, _MEASURE, measure)
        if stack is not None:
            setattr(dynamo_exceptions, _STACK, stack)

    return put_back


without_unread_measurements = ProcessWide(_leave_out)
"""Makes captures shorter by what Dynamo does for its developers, while it is open."""


def _stack_up_to_dynamo() -> StackSummary:
    """Returns the frames of the stack, the outermost first, up to the first one of Dynamo, with their columns."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    stack = StackSummary()
    for outer in reversed(frames):
        code = outer.f_code
        place = itertools.islice(code.co_positions(), max(outer.f_lasti, 0) // 2, None)
        _, _, column, end = next(place, (None, None, None, None))
        stack.append(
            FrameSummary(
                code.co_filename, outer.f_lineno, code.co_name, lookup_line=False, colno=column, end_colno=end
            )
        )
        # Dynamo's `filter_stack` ends here.
        if "convert_frame" in code.co_filename:
            break
    return stack
