"""float64 on the CPU: what ONNX Runtime has no kernels for in float64 though other operators can stand in."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.ortmodule._exceptions import ORTModuleONNXModelException
from onnxtrain.ortmodule.lowering import _formulas
from onnxtrain.passes import infer_shapes, inline_functions

_FORMULAS: dict[str, Callable[[Emitter, ir.Value], ir.Value]] = {
    "Acos": _formulas.acos,
    "Acosh": _formulas.acosh,
    "Asin": _formulas.asin,
    "Asinh": _formulas.asinh,
    "Atan": _formulas.atan,
    "Atanh": _formulas.atanh,
    "Cosh": _formulas.cosh,
    "Erf": _formulas.erf,
    "Sinh": _formulas.sinh,
    "Softplus": _formulas.softplus,
    "Tan": _formulas.tan,
}
"""Operators without attributes, whose gradients are built before they are replaced."""

_REFUSING = frozenset({"GRU", "LSTM"})
"""Operators whose CPU kernels take float64 when a session is made, and fail when it runs."""


def has_float64(model: ir.Model, op_types: Container[str] | None = None) -> bool:
    """Returns whether any node, or any of these ops, has a float64 result, other than the scalars that sizes become."""
    return any(
        _is_double(value) and (value.shape is None or len(value.shape) > 0)
        for node in model.graph
        if op_types is None or node.op_type in op_types
        for value in node.outputs
    )


def expand_float64(model: ir.Model) -> ir.Model:
    """Returns a model that computes in float64 by formulas what has no float64 kernel.

    `model` is not changed.

    Raises:
        ORTModuleONNXModelException: there is an operator whose kernel would fail at run time.
    """
    for node in model.graph:
        if node.op_type in _REFUSING and node.domain == "" and _is_double(node.inputs[0]):
            raise ORTModuleONNXModelException(
                f"ONNX Runtime's CPU provider has no kernel of {node.op_type} for float64 (node '{node.name}')"
            )
    # Gradients of activations use such operators inside of their functions.
    expanded = infer_shapes(inline_functions(model.clone())) if model.functions else model.clone()
    if not any(_lacking(expanded)):
        return model
    model = expanded
    graph = model.graph
    op = Emitter(graph, functions=model.functions)
    for node in list(_lacking(model)):
        (x,), (y,) = node.inputs, node.outputs
        assert x is not None
        op.scope = f"{node.name or node.op_type}/"
        value = _FORMULAS[node.op_type](op, x)
        value.shape = y.shape
        name = y.name
        y.replace_all_uses_with(value, replace_graph_outputs=True)
        graph.remove(node, safe=True)
        value.name = name
    graph.sort()
    return model


def _lacking(model: ir.Model) -> Iterator[ir.Node]:
    return (
        node
        for node in model.graph
        if node.op_type in _FORMULAS and node.domain == "" and _is_double(node.inputs[0])
    )


def _is_double(value: ir.Value | None) -> bool:
    return value is not None and value.dtype == ir.DataType.DOUBLE
