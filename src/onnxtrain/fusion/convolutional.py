"""Convolutional nets as the functions that native kernels know.

These functions have no gradient rules: the standard ops have, and the pass is for graphs that have their gradients. On
a stock runtime their bodies are the nodes that were there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.functions import (
    CompositeOp,
    batch_normalization_gradient,
    batch_normalization_relu,
    batch_normalization_relu_gradient,
    batch_normalization_training,
    convolution,
    relu_gradient_of_finite,
)
from onnxtrain.passes import is_training_batch_norm

__all__ = ["ConvolutionalPass"]

_FLOAT = ir.DataType.FLOAT
_Attributes = Mapping[str, int | float | list[int]]


class ConvolutionalPass(ir.passes.InPlacePass):
    """Rewrite Conv, training BatchNormalization and its gradient, with ReLU where there is one, in float32.

    To be run last: passes that look for these ops do not know the functions.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place; subgraphs stay."""
        op = Emitter(model.graph, functions=model.functions)
        rewrites: list[Callable[[Emitter, ir.Node], bool]] = [_convolution, _normalization, _gradient]
        modified = [
            rewrite(op, node)
            for node in tuple(model.graph)
            for rewrite in rewrites
            if node.graph is model.graph and node.inputs and _is_float(node.inputs[0])
        ]
        return ir.passes.PassResult(model, any(modified))


def _is_float(value: ir.Value | None) -> bool:
    return value is not None and value.dtype == _FLOAT


def _become(op: Emitter, node: ir.Node, composite: CompositeOp, attributes: _Attributes) -> None:
    """Makes a node a call of a composite op, with the inputs and outputs that it has."""
    node.domain, node.op_type, _ = op.function(composite, _FLOAT)
    node.attributes.clear()
    for name, value in attributes.items():
        node.attributes.add(ir.convenience.convert_attribute(name, value))


def _convolution(op: Emitter, node: ir.Node) -> bool:
    """Conv, if its padding is known."""
    weight = node.inputs[1] if (node.op_type, node.domain) == ("Conv", "") else None
    dims = static_dims(weight) if weight is not None else None
    auto_pad = node.attributes.get_string("auto_pad", "NOTSET")
    if dims is None or not 3 <= len(dims) <= 5 or auto_pad not in ("NOTSET", "VALID"):
        return False
    rank = len(dims) - 2
    given = node.attributes.get_ints("pads") if auto_pad == "NOTSET" else None
    attributes: dict[str, int | float | list[int]] = {
        "strides": list(node.attributes.get_ints("strides") or [1] * rank),
        "dilations": list(node.attributes.get_ints("dilations") or [1] * rank),
        "pads": list(given or [0] * 2 * rank),
        "group": node.attributes.get_int("group", 1),
    }
    _become(op, node, convolution, attributes)
    return True


def _normalization(op: Emitter, node: ir.Node) -> bool:
    """BatchNormalization, and a Relu that alone reads its result."""
    if not is_training_batch_norm(node):
        return False
    attributes = {
        "epsilon": node.attributes.get_float("epsilon", 1e-5),
        "momentum": node.attributes.get_float("momentum", 0.9),
    }
    y = node.outputs[0]
    readers = [use.node for use in y.uses()]
    relu = readers[0] if len(readers) == 1 and not y.is_graph_output() else None
    node.resize_outputs(3)
    for output in node.outputs:
        output.name = output.name or ""
    if relu is None or relu.op_type != "Relu" or relu.domain != "" or relu.graph is not node.graph:
        _become(op, node, batch_normalization_training, attributes)
        return True
    _become(op, node, batch_normalization_relu, attributes)
    result = relu.outputs[0]
    y.name, result.name = result.name, None
    result.replace_all_uses_with(y, replace_graph_outputs=True)
    op.graph.remove(relu, safe=True)
    return True


def _gradient(op: Emitter, node: ir.Node) -> bool:
    """The gradient of BatchNormalization behind that of a Relu."""
    if (node.domain, node.op_type) != batch_normalization_gradient.identifier(_FLOAT, {})[:2]:
        return False
    ct = node.inputs[0]
    relu = ct.producer() if ct is not None and len(ct.uses()) == 1 and not ct.is_graph_output() else None
    if relu is None or (relu.domain, relu.op_type) != relu_gradient_of_finite.identifier(_FLOAT, {})[:2]:
        return False
    y, inner = relu.inputs
    node.replace_input_with(0, inner)
    node.resize_inputs(4)
    node.replace_input_with(3, y)
    _become(
        op, node, batch_normalization_relu_gradient, {"epsilon": node.attributes.get_float("epsilon", 1e-5)}
    )
    op.graph.remove(relu, safe=True)
    return True
