"""Replaces ops without a float64 kernel in ONNX Runtime's CPU provider, e.g. Erf, with formulas that use other ops."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.ortmodule._exceptions import ORTModuleONNXModelException
from onnxtrain.ortmodule.lowering import _formulas
from onnxtrain.passes import infer_shapes, inline_functions

# Only ops without attributes. The formulas need no gradient rules: they are inserted after the gradient is built.
_FORMULAS: dict[str, Callable[[Emitter, ir.Value], ir.Value]] = {
    "Acos": _formulas.acos,
    "Acosh": _formulas.acosh,
    "Asin": _formulas.asin,
    "Asinh": _formulas.asinh,
    "Atan": _formulas.atan,
    "Atanh": _formulas.atanh,
    "Cosh": _formulas.cosh,
    "Erf": _formulas.erf,
    "Sigmoid": _formulas.sigmoid,
    "Sinh": _formulas.sinh,
    "Softplus": _formulas.softplus,
    "Tan": _formulas.tan,
}
"""Maps an op to the function that emits its formula. The formulas agree with PyTorch to 1e-14."""

_FAILING_KERNELS = frozenset({"GRU", "LSTM"})
"""Ops whose CPU kernels accept float64 when a session is created, but fail when it runs."""


def has_float64(model: ir.Model, op_types: Container[str] | None = None) -> bool:
    """True if a node has a float64 result that is not a scalar.

    Args:
        model: the model.
        op_types: ops whose nodes are considered, e.g. ("MatMul",); by default all ops.
    """
    # Python floats and size arithmetic are float64 scalars even in float32 models.
    return any(
        _is_double(value) and (value.shape is None or len(value.shape) > 0)
        for node in model.graph
        if op_types is None or node.op_type in op_types
        for value in node.outputs
    )


def expand_float64(model: ir.Model) -> ir.Model:
    """Replaces float64 ops that have no CPU kernel in ONNX Runtime with formulas that use other ops.

    Returns:
        A copy of the model, or the model itself if it has no such ops.

    Raises:
        ORTModuleONNXModelException: the model has a float64 GRU or LSTM, whose kernel would fail at run time.
    """
    for node in model.graph:
        if node.op_type in _FAILING_KERNELS and node.domain == "" and _is_double(node.inputs[0]):
            raise ORTModuleONNXModelException(
                f"ONNX Runtime's CPU provider has no kernel of {node.op_type} for float64 (node '{node.name}')"
            )
    # Function bodies may contain such ops, e.g. the gradient of GELU contains Erf.
    expanded = infer_shapes(inline_functions(model.clone())) if model.functions else model.clone()
    if not any(_nodes_without_kernel(expanded)):
        return model
    model = expanded
    graph = model.graph
    op = Emitter(graph, functions=model.functions)
    for node in list(_nodes_without_kernel(model)):
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


def _nodes_without_kernel(model: ir.Model) -> Iterator[ir.Node]:
    """Yields the float64 nodes that a formula must replace."""
    return (
        node
        for node in model.graph
        if node.op_type in _FORMULAS and node.domain == "" and _is_double(node.inputs[0])
    )


def _is_double(value: ir.Value | None) -> bool:
    return value is not None and value.dtype == ir.DataType.DOUBLE
