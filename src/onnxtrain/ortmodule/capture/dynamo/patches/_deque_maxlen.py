"""Breaks the graph at a `collections.deque(maxlen=...)` that was created outside the graph.

Dynamo (PyTorch 2.13) drops the `maxlen` of a deque that the captured function did not create: after `append` the deque
has one element too many.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from onnxtrain.ortmodule._torch import VariableBuilder, graph_break
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide, replace


def _break_at_bounded_deques() -> Callable[[], None]:
    """Patches Dynamo to break the graph at a `deque(maxlen=...)` created outside the graph.

    Returns:
        The undo function.
    """
    # Not `wrap_listlike`: Dynamo keeps it in a table that it fills once per process.
    before = VariableBuilder._wrap

    def wrap(self: Any, value: Any) -> Any:
        if isinstance(value, collections.deque) and value.maxlen is not None:
            graph_break(
                gb_type="Deque with maxlen",
                context=str(self.source),
                explanation="Dynamo ignores the maxlen of a deque.",
                hints=["Use a list."],
            )
        return before(self, value)

    return replace((VariableBuilder, "_wrap", wrap))


deque_maxlen = ProcessWide(_break_at_bounded_deques)
