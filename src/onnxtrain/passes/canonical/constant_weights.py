"""Find the weights of a file that keeps all of them in Constant nodes, as paddle2onnx and spox write them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir

from onnxtrain.passes.parameters.op_settings import is_setting
from onnxtrain.passes.tidy.constants import is_constant, unmark_constant

# Input indices, by op, that are weights even of one element, such as the bias of a layer with one unit.
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


def has_weights(model: ir.Model) -> bool:
    """Return whether an initializer of the file may be a weight: it is floating point and has several elements."""
    tensors = (value.const_value for graph in model.graphs() for value in graph.initializers.values())
    return any(tensor is not None and tensor.dtype.is_floating_point() and tensor.size > 1 for tensor in tensors)


def unmark_weights(model: ir.Model) -> None:
    """Make initializers that were Constant nodes parameters where they look like weights, in place.

    Of tensors with several elements only settings of ops stay constants. Of numbers only those are weights that a layer
    reads as such; the others belong to formulas, e.g. the 3 and the 6 of a hard swish.
    """
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if not is_constant(value) or tensor is None or not tensor.dtype.is_floating_point():
            continue
        uses = value.uses()
        if (tensor.size > 1 and not is_setting(value)) or any(
            use.node.domain == "" and use.idx in _WEIGHTS.get(use.node.op_type, ()) for use in uses
        ):
            unmark_constant(value)
