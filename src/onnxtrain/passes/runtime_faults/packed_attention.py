"""Expands MultiHeadAttention nodes with packed queries, keys and values into standard ops."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.canonical.inline_op_bodies import inline_schema_functions

_BIAS, _CACHE = 3, (8, 9)
# Inputs that the body of MultiHeadAttention does not support in addition to packed ones: bias, past key and past value.
_REFUSED = (_BIAS, *_CACHE)


def unpack_attention(model: ir.Model) -> ir.Model:
    """Expands `com.microsoft` MultiHeadAttention nodes with packed inputs into standard ops.

    ONNX Runtime's CPU provider (1.20 to 1.32) has no kernel for queries, keys and values in one tensor `[batch,
    sequence, heads, 3, size]`, nor for keys and values in one tensor. Differentiation expands such nodes if a gradient
    flows through them. This function expands the other packed nodes, e.g. in frozen layers or in the eval model.

    Returns:
        A copy with the nodes expanded, or `model` itself if it has no such node.
    """
    if not any(map(_is_packed, ir.traversal.RecursiveGraphIterator(model.graph))):
        return model
    return inline_schema_functions(model, lambda node: not _is_packed(node))


def _is_packed(node: ir.Node) -> bool:
    """True if a node is a MultiHeadAttention with a packed input that its function body supports."""
    if node.op_type != "MultiHeadAttention" or node.domain != "com.microsoft":
        return False
    inputs = dict(enumerate(node.inputs))
    if any(inputs.get(index) is not None for index in _REFUSED):
        return False
    # Input 0 alone contains queries, keys and values; input 1 without input 2 contains keys and values.
    packed = inputs.get(0) if inputs.get(1) is None else inputs.get(1) if inputs.get(2) is None else None
    return packed is not None and packed.shape is not None and packed.shape.rank() == 5
