"""Breaks the graph where the captured function draws from a `random.Random` that was created outside the graph.

Dynamo (PyTorch 2.13) makes the state of the generator a constant of the graph, without a guard: each call draws the
same numbers as the first call (https://github.com/pytorch/pytorch/issues/145445). PyTorch 2.14 and 2.15 still do so for
`shuffle`, `sample` and `getstate` (https://github.com/pytorch/pytorch/issues/197085).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from onnxtrain.ortmodule._torch import RandomVariable, graph_break
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide, replace

_STATE_SETTERS = ("seed", "setstate")


def _break_at_draws() -> Callable[[], None]:
    """Patches Dynamo to break the graph at draws from a `random.Random` created outside the graph.

    Returns:
        The undo function.
    """
    before = RandomVariable.call_method

    @functools.wraps(before)
    def call_method(self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        # A generator that the captured function has created has no source. Each call creates a new generator.
        if self.source is not None and name not in _STATE_SETTERS:
            graph_break(
                gb_type="Draw from a random.Random",
                context=f"{self.source}.{name}",
                explanation="The state of the generator changes with each call.",
                hints=["Use torch.rand, or the functions of the module random."],
            )
        return before(self, tx, name, *args, **kwargs)

    return replace((RandomVariable, "call_method", call_method))


random_objects = ProcessWide(_break_at_draws)
