"""Decides which nodes an elementwise program can compute."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir

from onnxtrain.functions import DOMAIN
from onnxtrain.fusion._windows import window_of
from onnxtrain.passes import dims_of, known_array

INSTRUCTIONS = (
    "Add", "Sub", "Mul", "Div", "Neg", "Abs", "Reciprocal", "Sqrt", "Exp", "Log", "Sigmoid", "Tanh", "Erf", "Relu",
    "Max", "Min", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "And", "Or", "Not", "Where", "Cast",
    "IsNaN", "Sign", "Floor", "Ceil", "Round", "Softplus", "Sin", "Cos", "Pow", "Log1p", "Window",
)  # fmt: skip
"""Standard ops in the order of the kernel's opcodes. Cast is that of a boolean to a float. No op is Log1p; Window is a
Slice or a Pad."""

EXPANSIONS = frozenset({"LeakyRelu", "Gelu", "Pow", "Clip"})
"""Standard ops that are several instructions."""

MASKS = frozenset({"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "IsNaN", "And", "Or", "Not"})
_LOGIC = frozenset({"And", "Or", "Not"})
_CHEAP = frozenset({"Add", "Sub", "Mul", "Neg"})
_FLOAT, _BOOL = ir.DataType.FLOAT, ir.DataType.BOOL


def elementwise_leaves(
    node: ir.Node, functions: Mapping[ir.OperatorIdentifier, ir.Function]
) -> list[ir.Value] | None:
    """Returns the values that a program reads to compute a node; None if it cannot compute it.

    For a node that reads a comparison these are the compared values. All are float32, except for bool values that the
    program does not compute: the condition of a Where may be such a value, or And, Or or Not of some.
    """
    if len(node.outputs) != 1 or node.outputs[0].dtype != _FLOAT or dims_of(node.outputs[0]) is None:
        return None
    if node.domain == DOMAIN:
        function = functions.get(node.op_identifier())
        if function is None or not _is_program(function):
            return None
    elif node.domain != "" or not _is_instruction(node):
        return None
    leaves: list[ir.Value] = []
    # The Cast of a bool value is a float32 value that programs read as it is.
    bools = node.domain == "" and node.op_type == "Where"
    for value in node.inputs:
        if value is None or not _add_leaves(value, leaves, bools):
            return None
    # Without a float32 value, e.g. Where(mask, 0, 1), the node stays outside: ONNX Runtime folds it if it is constant.
    return leaves if _has_floats(leaves) else None


def is_elementwise(node: ir.Node, functions: Mapping[ir.OperatorIdentifier, ir.Function]) -> bool:
    """True if a program can compute a node as part of a chain: an elementwise op, a comparison, or a window."""
    if window_of(node) is not None:
        return True
    if node.outputs[0].dtype != _BOOL:
        return elementwise_leaves(node, functions) is not None
    leaves: list[ir.Value] = []
    return (
        computes_mask(node)
        and dims_of(node.outputs[0]) is not None
        and _add_leaves(node.outputs[0], leaves, bools=True)
        and _has_floats(leaves)
    )


def computes_mask(node: ir.Node) -> bool:
    """True if a program can compute a node with a bool result: a comparison of float32 values, And, Or or Not.

    Other bool values are inputs of the programs that read them.
    """
    dtype = _BOOL if node.op_type in _LOGIC else _FLOAT
    return (
        node.domain == ""
        and node.op_type in MASKS
        and all(value is not None and value.dtype == dtype for value in node.inputs)
    )


def _has_floats(leaves: Iterable[ir.Value]) -> bool:
    return any(value.dtype == _FLOAT for value in leaves)


def _add_leaves(value: ir.Value, leaves: list[ir.Value], bools: bool) -> bool:
    """Appends the values that a program reads to compute a value; False if it cannot compute it.

    Args:
        value: a float32 value, or the result of a comparison, which is read from the compared values.
        leaves: the list to append to.
        bools: True if the program may also read bool values that it does not compute.
    """
    node = value.producer()
    if value.dtype == _BOOL and node is not None and computes_mask(node):
        return all(source is not None and _add_leaves(source, leaves, bools) for source in node.inputs)
    if value.dtype == _FLOAT and number_of(value) is not None:
        return True
    if (value.dtype != _FLOAT and not (value.dtype == _BOOL and bools)) or dims_of(value) is None:
        return False
    leaves.append(value)
    return True


def _is_instruction(node: ir.Node) -> bool:
    """True if a node of the standard domain, with suitable inputs, is one instruction."""
    if node.op_type in ("Max", "Min"):
        return len(node.inputs) == 2
    if node.op_type == "Cast":
        return node.inputs[0] is not None and node.inputs[0].dtype == _BOOL
    if node.op_type == "Gelu":
        return node.attributes.get_string("approximate", "none") == "none"
    if node.op_type == "Clip":
        numbers = [math.nan if bound is None else number_of(bound) for bound in node.inputs[1:]]
        return bool(numbers) and all(number is not None and not math.isnan(number) for number in numbers)
    if node.op_type == "Pow":
        return node.inputs[1] is not None and number_of(node.inputs[1]) in (2.0, 3.0)
    if node.op_type in EXPANSIONS:
        return True
    return node.op_type in INSTRUCTIONS and node.op_type not in (*MASKS, "Pow")


def _is_program(function: ir.Function) -> bool:
    """True if the body of a function consists of instructions and scalar constants."""
    return len(function.outputs) == 1 and all(
        node.domain == ""
        and all(attribute.ref_attr_name is None for attribute in node.attributes.values())
        and (
            (node.op_type == "Constant" and number_of(node.outputs[0]) is not None)
            or node.op_type in MASKS
            or _is_instruction(node)
        )
        for node in function
    )


def number_of(value: ir.Value) -> float | None:
    """Returns a constant of one element and without axes; None for other values, and for bools."""
    if value.shape is not None and len(value.shape) > 0:
        return None
    array = known_array(value)
    return float(array) if array is not None and array.ndim == 0 and array.dtype != np.bool_ else None


def bool_source(value: ir.Value) -> ir.Value | None:
    """Returns the bool value of which a float32 value is the Cast, if programs don't compute it; None otherwise."""
    node = value.producer()
    if node is None or (node.domain, node.op_type) != ("", "Cast") or value.dtype != _FLOAT:
        return None
    source = node.inputs[0]
    if source is None or source.dtype != _BOOL:
        return None
    producer = source.producer()
    return source if producer is None or not computes_mask(producer) else None


def window_source(value: ir.Value) -> ir.Value | None:
    """Returns the source of a Slice or a Pad, or of an op between such windows of one value; None for other values.

    A program reads the source in place of the value.
    """
    node = value.producer()
    if node is None or node.domain != "" or value.dtype != _FLOAT:
        return None
    window = window_of(node)
    if window is not None:
        # Of one column, the value may broadcast to all columns.
        return window.source if window.size > 1 else None
    if node.op_type not in _CHEAP:
        return None
    windows = [
        operand.producer() for operand in node.inputs if operand is not None and number_of(operand) is None
    ]
    found = [window_of(operand) if operand is not None else None for operand in windows]
    if not found or any(w is None or w.size == 1 for w in found):
        return None
    first = found[0]
    assert first is not None
    same = all(w is not None and (w.source, w.axis) == (first.source, first.axis) for w in found)
    return first.source if same else None
