"""Turns weights in Constant nodes into initializers, for files without other weights (paddle2onnx, spox)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir

from onnxtrain.passes.parameters.op_settings import is_setting
from onnxtrain.passes.tidy.constants import add_initializer
from onnxtrain.passes.tidy.unique_names import fresh_name

# Input indices, by op, that are weights even if they have only one element, e.g. the bias of a layer with one unit.
_WEIGHTS: Mapping[str, Collection[int]] = {
    "BatchNormalization": (1, 2, 3, 4),
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "GRU": (1, 2, 3),
    "Gemm": (1, 2),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LSTM": (1, 2, 3, 7),
    "LayerNormalization": (1, 2),
    "MatMul": (0, 1),
    "PRelu": (1,),
    "RNN": (1, 2, 3),
}


def lift_weights(model: ir.Model) -> None:
    """Turns Constant nodes that look like weights, also in subgraphs, into initializers of the main graph, in place.

    Does nothing if a floating-point initializer has more than one element: such a model stores its weights as
    initializers, and its Constant nodes are operands of formulas.
    """
    tensors = (value.const_value for graph in model.graphs() for value in graph.initializers.values())
    if any(tensor is not None and tensor.dtype.is_floating_point() and tensor.size > 1 for tensor in tensors):
        return
    for node in tuple(ir.traversal.RecursiveGraphIterator(model.graph)):
        output = node.outputs[0] if node.op_type == "Constant" and node.domain == "" else None
        tensor = ir.convenience.get_const_tensor(output) if output is not None else None
        if output is None or tensor is None or output.is_graph_output() or not _is_weight(output, tensor):
            continue
        name, output.name = str(output.name), None
        tensor.name = fresh_name(model, name)
        output.replace_all_uses_with(add_initializer(model.graph, tensor))
        assert node.graph is not None
        node.graph.remove(node, safe=True)


def _is_weight(value: ir.Value, tensor: ir.TensorProtocol) -> bool:
    """True if a constant looks like a weight.

    A floating-point tensor with several elements is a weight unless it is a setting of an op. A single number is a
    weight only if a layer reads it as one; other numbers are operands of a formula, e.g. 3 and 6 in a hard swish.
    """
    if not tensor.dtype.is_floating_point():
        return False
    if tensor.size > 1:
        return not is_setting(value)
    return any(
        use.node.domain == "" and use.idx in _WEIGHTS.get(use.node.op_type, ()) for use in value.uses()
    )
