"""Replace MultiHeadAttention of packed queries, keys and values by standard ops."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.canonical.inline_op_bodies import inline_schema_functions

_BIAS, _CACHE = 3, (8, 9)
# Inputs of MultiHeadAttention that its body does not support beside packed ones: bias, past key and past value.
_REFUSED = (_BIAS, *_CACHE)


def unpack_attention(model: ir.Model) -> ir.Model:
    """Return `model`, or a copy with standard ops if it has packed MultiHeadAttention of `com.microsoft`.

    ONNX Runtime's CPU provider (1.20 to 1.32) has no kernel for queries, keys and values in one tensor
    `[batch, sequence, heads, 3, size]`, nor for keys and values in one. Differentiation expands such nodes on the path
    of a gradient. This function expands those off the path, and those of the eval model.
    """
    if not any(map(_is_packed, ir.traversal.RecursiveGraphIterator(model.graph))):
        return model
    return inline_schema_functions(model, lambda node: not _is_packed(node))


def _is_packed(node: ir.Node) -> bool:
    """Tell if a node is a MultiHeadAttention of a packed tensor that its body supports."""
    if node.op_type != "MultiHeadAttention" or node.domain != "com.microsoft":
        return False
    inputs = dict(enumerate(node.inputs))
    if any(inputs.get(index) is not None for index in _REFUSED):
        return False
    # Input 0 alone holds queries, keys and values; input 1 without input 2 holds keys and values.
    packed = inputs.get(0) if inputs.get(1) is None else inputs.get(1) if inputs.get(2) is None else None
    return packed is not None and packed.shape is not None and packed.shape.rank() == 5
