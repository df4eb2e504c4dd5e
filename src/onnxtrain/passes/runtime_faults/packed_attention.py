"""Write attention of packed queries, keys and values in standard ops."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.canonical.inline_op_bodies import inline_schema_functions

_BIAS, _CACHE = 3, (8, 9)
_REFUSED = (_BIAS, *_CACHE)
"""Inputs of MultiHeadAttention that its body does not take together with packed ones."""


def unpack_attention(model: ir.Model) -> ir.Model:
    """Return `model`, or if it has packed MultiHeadAttention of `com.microsoft`, a copy with standard ops instead.

    The CPU provider of ONNX Runtime (1.32) has no kernel for queries, keys and values in one tensor
    `[batch, sequence, heads, 3, size]`, nor for keys and values in one. On the path of a gradient such a node is
    standard ops already; before the parameters, and in evaluation, it is not.
    """
    if not any(map(_is_packed, ir.traversal.RecursiveGraphIterator(model.graph))):
        return model
    return inline_schema_functions(model, lambda node: not _is_packed(node))


def _is_packed(node: ir.Node) -> bool:
    if node.op_type != "MultiHeadAttention" or node.domain != "com.microsoft":
        return False
    inputs = dict(enumerate(node.inputs))
    if any(inputs.get(index) is not None for index in _REFUSED):
        return False
    # One of queries, keys and values, or one of keys and values.
    packed = inputs.get(0) if inputs.get(1) is None else inputs.get(1) if inputs.get(2) is None else None
    return packed is not None and packed.shape is not None and packed.shape.rank() == 5
