"""Rewrites products with packed weights as functions with native kernels, where ONNX Runtime unpacks whole weights."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.functions import packed_matmul, packed_matmul_of_float_zeros
from onnxtrain.fusion._pass import KeepingPass

_FLOAT = ir.DataType.FLOAT


class PackedProductPass(KeepingPass):
    """Replaces slow float32 MatMulNBits nodes with functions that have native kernels.

    ONNX Runtime (1.32) unpacks 2-bit and 8-bit weights, and weights with floating-point zero points, into a float
    matrix in each call. It reads other 4-bit weights directly, as fast as the native kernel does, so they are not
    rewritten.

    Run this pass last: other passes don't recognize the functions. On a stock runtime, each function runs its body,
    which is the replaced node.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place; subgraphs are not modified."""
        op, modified = Emitter(model.graph, functions=model.functions), False
        for node in tuple(model.graph):
            if _is_slow(node) and not self.keeps(node):
                _rewrite(op, node)
                modified = True
        return ir.passes.PassResult(model, modified)


def _is_slow(node: ir.Node) -> bool:
    """True for a MatMulNBits if ONNX Runtime would unpack its whole weight, and the native kernel supports it."""
    if (node.domain, node.op_type) != ("com.microsoft", "MatMulNBits"):
        return False
    a, _, scales, zero_points, *others = (*node.inputs, None)
    # `others` are g_idx, a permutation of blocks, and a bias, whose shape onnxruntime checks even if it is unknown.
    if a is None or scales is None or any(value is not None for value in others):
        return False
    attributes = node.attributes
    # An `accuracy_level` of 4 rounds activations to int8, which the native kernel doesn't.
    if attributes.get_int("accuracy_level", 0) or attributes.get_int("weight_prepacked", 0):
        return False
    if not a.dtype == scales.dtype == _FLOAT:
        return False
    bits = attributes.get_int("bits", 4)
    if zero_points is None or zero_points.dtype == ir.DataType.UINT8:
        return bits in (2, 8)
    # ONNX Runtime rejects floating-point zero points with 8 bits.
    return zero_points.dtype == _FLOAT and bits in (2, 4)


def _rewrite(op: Emitter, node: ir.Node) -> None:
    """Turns a MatMulNBits into a call to the composite op, with the same inputs, K, N, bits and block size."""
    zero_points = (*node.inputs, None)[3]
    has_float_zeros = zero_points is not None and zero_points.dtype == _FLOAT
    composite = packed_matmul_of_float_zeros if has_float_zeros else packed_matmul
    sizes = {name: node.attributes.get_int(name, 4) for name in composite.attributes}
    node.domain, node.op_type, _ = op.function(composite, _FLOAT)
    node.attributes.clear()
    for name, size in sizes.items():
        node.attributes.add(ir.AttrInt64(name, size))
    node.resize_inputs(4)
