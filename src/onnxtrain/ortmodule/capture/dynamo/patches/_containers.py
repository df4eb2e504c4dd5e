"""Have Dynamo ask lists what Python asks them, where Dynamo (PyTorch 2.13) itself answers wrongly."""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Iterable
from typing import Any

from onnxtrain.ortmodule._torch import (
    SymNodeVariable,
    VariableBuilder,
    VariableTracker,
    dynamo_lists,
    dynamo_utils,
    graph_break,
)
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide, replace


def _correct() -> Callable[[], None]:
    """Corrects `in` and `deque`; returns the function that takes that back."""
    iter_contains = dynamo_utils.iter_contains
    wrap_listlike = VariableBuilder.wrap_listlike

    def contains(items: Iterable[Any], search: Any, tx: Any, check_tensor_identity: bool = False) -> Any:
        items = list(items)
        if search.is_python_constant():
            # Dynamo compares a constant with constants only: `6 in x.shape` is False, once the size is a symbol, as is
            # `(6, 3) in [tuple(x.shape)]`. Each comparison with a symbol becomes a guard; with a number of the data it
            # ends the graph.
            constant = search.as_python_constant()
            kind = SymNodeVariable if isinstance(constant, int | float) else dynamo_lists.BaseListVariable
            symbolic = (item for item in items if isinstance(item, kind) and not item.is_python_constant())
            if any(_are_equal(tx, item, search) for item in symbolic):
                items = [search]
        return iter_contains(items, search, tx, check_tensor_identity)

    def wrap(self: Any, value: Any) -> Any:
        # Dynamo forgets `maxlen` of a deque that it has not made itself: after `append` it has one element too many.
        if isinstance(value, collections.deque) and value.maxlen is not None:
            graph_break(
                gb_type="Deque with maxlen",
                context=str(self.source),
                explanation="Dynamo does not keep to the greatest length of a deque.",
                hints=["Use a list."],
            )
        return wrap_listlike(self, value)

    # `dynamo_lists` has imported the function by name.
    return replace(
        (dynamo_utils, "iter_contains", contains),
        (dynamo_lists, "iter_contains", contains),
        (VariableBuilder, "wrap_listlike", wrap),
    )


as_python_contains = ProcessWide(_correct)
"""Makes `in` and `deque(maxlen=...)` in captured functions what they are in Python, while it is open."""


def _are_equal(tx: Any, item: Any, search: Any) -> bool:
    """Returns whether two values of a captured function are equal; Dynamo guards on the answer."""
    result = VariableTracker.build(tx, operator.eq).call_function(tx, [item, search], {})
    return bool(result.sym_num if isinstance(result, SymNodeVariable) else result.as_python_constant())
