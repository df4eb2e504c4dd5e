"""Makes graphs raise the errors of Python arithmetic where ONNX would return a result: `1 / count`, `int(x.mean())`.

The operands become outputs of the graph, like the conditions of assertions. After a run they are passed to the Python
function, which raises ZeroDivisionError, ValueError or OverflowError.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from onnxtrain.ortmodule.capture._nodes import depends_on_data, has_float_input

_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("sym_int", "trunc", "floor", "ceil"), int),
    **{
        f"_sym_{function.__name__}": function
        for function in (
            math.sqrt,
            math.log2,
            math.sin,
            math.cos,
            math.tan,
            math.asin,
            math.acos,
            math.sinh,
            math.cosh,
        )
    },
    "sym_sqrt": math.sqrt,
    # The message of the error depends on the type of the dividend.
    "int truediv": lambda divisor: 1 / divisor,
    "float truediv": lambda divisor: 1.0 / divisor,
    "int floordiv": lambda divisor: 1 // divisor,
    "float floordiv": lambda divisor: 1.0 // divisor,
    "int mod": lambda divisor: 1 % divisor,
    "float mod": lambda divisor: 1.0 % divisor,
    "pow": lambda base: base**-1,
}
"""Maps the name of an operator to a Python function of one number that raises for some numbers. For divisions and the
modulo, the number is the divisor, and the key begins with the type of the dividend. For powers, it is the base."""

_DIVISIONS = {
    operator.truediv: "truediv", operator.itruediv: "truediv", operator.floordiv: "floordiv",
    operator.ifloordiv: "floordiv", operator.mod: "mod", operator.imod: "mod",
}  # fmt: skip


def check_numbers(graph: fx.Graph) -> bool:
    """Inserts a call to `evaluate` before each Python operation that may raise for a data-dependent number.

    Returns:
        True if the graph was changed.
    """
    found = [(node, *checked) for node in graph.nodes if (checked := _checked_number(node)) is not None]
    for node, number, function in found:
        with graph.inserting_before(node):
            graph.call_function(evaluate, (number, function))
    return bool(found)


def evaluate(number: Any, function: str) -> None:
    """Raises the error that a Python operation raises for a number, e.g. ZeroDivisionError for the divisor 0.

    Args:
        number: the operand that decides whether the operation raises.
        function: key in `_FUNCTIONS` of the function to call, e.g. "int truediv". Its result is discarded.
    """
    _FUNCTIONS[function](number)


def _checked_number(node: fx.Node) -> tuple[fx.Node, str] | None:
    """Finds the operand whose value may make a node raise, e.g. the divisor of a division.

    Returns:
        The operand, and the node's key in `_FUNCTIONS`; or None if the node cannot raise.
    """
    if node.op != "call_function":
        return None
    if node.target in _DIVISIONS:
        dividend, number = node.args
        function = f"{_number_type(dividend)} {_DIVISIONS[node.target]}"
    elif node.target in (operator.pow, operator.ipow):
        number, exponent = node.args
        function = "pow"
        if not isinstance(exponent, int | float) or exponent >= 0:
            return None
    elif len(node.args) == 1:
        (number,) = node.args
        function = getattr(node.target, "__name__", "")
    else:
        return None
    if function not in _FUNCTIONS or not isinstance(number, fx.Node):
        return None
    value = number.meta.get("example_value")
    if not isinstance(value, torch.SymInt | torch.SymFloat):
        return None
    # For sizes of inputs, Dynamo adds the guards that a function needs.
    if not (depends_on_data(value) or has_float_input(value)):
        return None
    is_whole = isinstance(value, torch.SymInt)
    never_raises = is_whole if _FUNCTIONS[function] is int else statically_known_true(value > 0)
    return None if never_raises and function not in _RAISE_FOR_POSITIVE_NUMBERS else (number, function)


_RAISE_FOR_POSITIVE_NUMBERS = (
    "_sym_sin", "_sym_cos", "_sym_tan", "_sym_asin", "_sym_acos", "_sym_sinh", "_sym_cosh"
)  # fmt: skip
"""Functions that raise for some positive numbers, too, e.g. `math.asin(2)` and `math.cosh(1000)`."""


def _number_type(number: Any) -> str:
    """Returns the type of a number: "int" or "float", or "" for a tensor."""
    value = number.meta.get("example_value") if isinstance(number, fx.Node) else number
    if isinstance(value, float | torch.SymFloat):
        return "float"
    return "int" if isinstance(value, int | torch.SymInt) else ""
