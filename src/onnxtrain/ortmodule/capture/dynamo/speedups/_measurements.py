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
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide, replace


def _leave_out() -> Callable[[], None]:
    """Replaces two functions of Dynamo; returns the function that takes that back."""
    measure = dynamo_guards.profile_guard_manager  # type: ignore[attr-defined]

    # Dynamo (PyTorch 2.13) empties the caches of the processor to measure its guards, 17 ms for each graph.
    def measured_for_a_log(*args: Any) -> float:
        return float(measure(*args)) if dynamo_guards.guards_log.isEnabledFor(logging.DEBUG) else 0.0

    replacements: list[tuple[Any, str, Any]] = [(dynamo_guards, "profile_guard_manager", measured_for_a_log)]
    # And at each end of a graph it looks up the columns of all frames on the stack, 6 ms, to drop all but the first.
    # PyTorch 2.12 does not.
    if hasattr(dynamo_exceptions, "_extract_stack_with_positions"):
        replacements.append((dynamo_exceptions, "_extract_stack_with_positions", _stack_up_to_dynamo))
    return replace(*replacements)


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
