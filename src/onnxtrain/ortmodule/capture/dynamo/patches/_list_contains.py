"""Fixes Dynamo's `in` for lists and tuples with symbolic numbers.

Dynamo (PyTorch 2.13) compares a constant only with the constants of the list: once a size is a symbol, `6 in x.shape`
is False, and so is `(6, 3) in [tuple(x.shape)]` (https://github.com/pytorch/pytorch/issues/153366).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from onnxtrain.ortmodule._torch import SymNodeVariable, VariableTracker, dynamo_lists, dynamo_utils
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide, replace


def _compare_symbols() -> Callable[[], None]:
    """Patches Dynamo's `in` to compare a constant with symbolic items as well; returns the undo function."""
    before = dynamo_utils.iter_contains

    def contains(items: Iterable[Any], search: Any, tx: Any, check_tensor_identity: bool = False) -> Any:
        items = list(items)
        if search.is_python_constant():
            # Each comparison becomes a guard. With a data-dependent number it ends the graph.
            constant = search.as_python_constant()
            kind = SymNodeVariable if isinstance(constant, int | float) else dynamo_lists.BaseListVariable
            symbolic = (item for item in items if isinstance(item, kind) and not item.is_python_constant())
            if any(_are_equal(tx, item, search) for item in symbolic):
                items = [search]
        return before(items, search, tx, check_tensor_identity)

    # `dynamo_lists` imports the function by name.
    name = "iter_contains"
    return replace((dynamo_utils, name, contains), (dynamo_lists, name, contains))


list_contains = ProcessWide(_compare_symbols)


def _are_equal(tx: Any, item: Any, search: Any) -> bool:
    """True if two values of a captured function are equal. Dynamo guards on the result."""
    result = VariableTracker.build(tx, operator.eq).call_function(tx, [item, search], {})
    return bool(result.sym_num if isinstance(result, SymNodeVariable) else result.as_python_constant())
