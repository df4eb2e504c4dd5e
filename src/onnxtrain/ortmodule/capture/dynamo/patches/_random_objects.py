"""End the graph where a captured function draws from a `random.Random` that is older than the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from onnxtrain.ortmodule._torch import RandomVariable, graph_break
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide, replace

_SET_THE_STATE = ("seed", "setstate")


def _watch_draws() -> Callable[[], None]:
    """Has Python execute draws; returns the function that takes that back."""
    before = RandomVariable.call_method

    # Dynamo (PyTorch 2.13) writes the state of the generator into the graph, which nothing guards: each call would draw
    # the numbers of the first one. Later versions do so for `shuffle`, `sample` and `getstate`.
    @functools.wraps(before)
    def call_method(self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        # A generator that the captured function has made has no source: its state is that of each call.
        if self.source is not None and name not in _SET_THE_STATE:
            graph_break(
                gb_type="Draw from a random.Random",
                context=f"{self.source}.{name}",
                explanation="The state of the generator changes with each call.",
                hints=["Use torch.rand, or the functions of the module random."],
            )
        return before(self, tx, name, *args, **kwargs)

    return replace((RandomVariable, "call_method", call_method))


random_objects_draw_in_python = ProcessWide(_watch_draws)
"""Makes `rng.random()` in captured functions draw anew in each call, while it is open."""
