"""Finds initializers that configure ops: bounds, sizes, quantization scales, rotary caches."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir

from onnxtrain.op_facts import CASTS, MOVES

_MS = "com.microsoft"
# Domain of ops that ONNX Runtime's optimizer writes for images in channels-last layout.
_INTERNAL = "com.ms.internal.nhwc"

# Input indices, by domain and op, that configure the op. Users don't intend to train the bounds of a ReLU6, the scales
# of an upsampling, or the boxes of a crop, for which the result is discontinuous.
_SETTINGS: Mapping[tuple[str, str], Collection[int]] = {
    ("", "Clip"): (1, 2),
    ("", "Dropout"): (1,),
    ("", "MaxRoiPool"): (1,),
    ("", "OneHot"): (2,),
    ("", "Pad"): (2,),
    ("", "Resize"): (1, 2),
    ("", "RoiAlign"): (1,),
}

# Input indices of scales and zero points that several binary and unary quantized ops have in common.
_LINEAR_CONV = (1, 2, 4, 5, 6, 7)
_UNARY_LINEAR = (1, 2, 3, 4)

# Input indices of scales and zero points, by domain and op, as in onnx 1.23 and onnxruntime 1.32. The integers were
# quantized with them, and runtimes fold or pack them with the integers: training one would change a whole block of
# weights.
_QUANTIZATION: Mapping[tuple[str, str], Collection[int]] = {
    **{(domain, op): (1, 2) for domain in ("", _MS) for op in ("DequantizeLinear", "QuantizeLinear")},
    **{(domain, "QLinearConv"): _LINEAR_CONV for domain in ("", _MS, _INTERNAL)},
    **{(domain, "QLinearAveragePool"): _UNARY_LINEAR for domain in (_MS, _INTERNAL)},
    ("", "QLinearMatMul"): _LINEAR_CONV,
    (_INTERNAL, "QLinearConvTranspose"): _LINEAR_CONV,
    (_MS, "DequantizeWithOrder"): (1,),
    (_MS, "DynamicQuantizeLSTM"): (8, 9, 10, 11),
    (_MS, "DynamicQuantizeMatMul"): (2, 3),
    (_MS, "DynamicSparseAttention"): (18, 19),
    (_MS, "GatherBlockQuantized"): (2, 3),
    (_MS, "GemmFloat8"): (3, 4, 5),
    (_MS, "GroupQueryAttention"): (12, 13),
    (_MS, "MatMulBlockQuantizedFp4Weight"): (2, 3, 4),
    (_MS, "MatMulBlockQuantizedFp8Weight"): (2, 3),
    (_MS, "MatMulBnb4"): (2,),
    (_MS, "MatMulIntegerToFloat"): (2, 3, 4, 5),
    (_MS, "MatMulNBits"): (2, 3),
    (_MS, "MatMulNBitsMlp"): (4, 7),
    (_MS, "MatMulNBitsQLoRA"): (2, 4, 6),
    (_MS, "MatMulNBitsQkv"): (4, 7, 10),
    (_MS, "MatMulPacked"): (2,),
    (_MS, "PagedAttention"): (14, 15),
    (_MS, "QAttention"): (3, 4, 6, 7),
    (_MS, "QEmbedLayerNormalization"): range(8, 18),
    (_MS, "QGemm"): (1, 2, 4, 5, 7, 8),
    (_MS, "QLinearAdd"): _LINEAR_CONV,
    (_MS, "QLinearGlobalAveragePool"): _UNARY_LINEAR,
    (_MS, "QLinearLeakyRelu"): _UNARY_LINEAR,
    (_MS, "QLinearMul"): _LINEAR_CONV,
    (_MS, "QLinearReduceMean"): _UNARY_LINEAR,
    (_MS, "QLinearSigmoid"): _UNARY_LINEAR,
    (_MS, "QLinearSoftmax"): _UNARY_LINEAR,
    (_MS, "QLinearWhere"): (2, 3, 5, 6, 7, 8),
    (_MS, "QMoE"): (3, 6, 9, 11, 12, 13, 15, 16, 17, 18, 19, 20),
    (_MS, "QOrderedAttention"): (1, 2, 3, 4, 8, 9, 10, 14, 15, 16),
    (_MS, "QOrderedGelu"): (1, 2),
    (_MS, "QOrderedLayerNormalization"): (1, 4),
    (_MS, "QOrderedLongformerAttention"): (1, 3, 5, 6, 9, 11, 13),
    (_MS, "QOrderedMatMul"): (1, 3, 4, 7),
    (_MS, "QuantizeWithOrder"): (1,),
    (_MS, "SparsePagedAttention"): (19, 20),
}

# Input indices of cosines and sines of positions. They are functions of the position; trained, they would no longer
# describe a rotation.
_ROTARY: Mapping[tuple[str, str], Collection[int]] = {
    ("", "RotaryEmbedding"): (1, 2),
    (_MS, "DynamicSparseAttention"): (11, 12),
    (_MS, "GroupQueryAttention"): (7, 8),
    (_MS, "MRotaryEmbedding"): (2, 3),
    (_MS, "PackedSparseAttentionIndexer"): (4, 5),
    (_MS, "PagedAttention"): (8, 9),
    (_MS, "RMSNormRotary"): (3, 4),
    (_MS, "RotaryEmbedding"): (2, 3),
    (_MS, "SparseAttention"): (9, 10),
    (_MS, "SparseAttentionIndexer"): (4, 5),
    (_MS, "SparsePagedAttention"): (14, 15),
}

# Selected rows of a cache are still a cache.
_PASSING_ON = MOVES | CASTS


def is_setting(value: ir.Value) -> bool:
    """True if `value` is only read as a setting of ops, e.g. as a bound of Clip, which should not be trained.

    False if nothing reads it.
    """
    uses = value.uses()
    return bool(uses) and all(
        use.idx in _SETTINGS.get((use.node.domain, use.node.op_type), ()) for use in uses
    )


def has_quantized_ops(graph: ir.Graph) -> bool:
    """True if `graph` or one of its subgraphs contains an op that reads quantization scales, e.g. MatMulNBits.

    QLinearConcat, which has a variable number of scales, is not detected.
    """
    return any(
        (node.domain, node.op_type) in _QUANTIZATION for node in ir.traversal.RecursiveGraphIterator(graph)
    )


def is_quantization_or_rotary(value: ir.Value) -> bool:
    """True if `value` is only used as a quantization scale, zero point or rotary cache.

    Also follows ops that only move or cast elements, e.g. a Gather that selects rows of the cache for a
    RotaryEmbedding. False if the value is unread or a graph output.
    """
    uses = value.uses()
    return bool(uses) and not value.is_graph_output() and all(_is_fixed(use.node, use.idx) for use in uses)


def _is_fixed(node: ir.Node, index: int) -> bool:
    """True if input `index` of a node is a quantization scale, a zero point or a rotary cache.

    If the node only moves or casts elements, its outputs are checked instead. A factor that a Mul multiplies by the
    scale of DynamicQuantizeLinear also counts as a quantization scale.
    """
    op = (node.domain, node.op_type)
    if index in _QUANTIZATION.get(op, ()) or index in _ROTARY.get(op, ()):
        return True
    # Inputs: scale and zero point of the output, then tensor, scale and zero point of each operand.
    if op == (_MS, "QLinearConcat"):
        return index < 2 or (index - 2) % 3 > 0
    if op == ("", "Mul"):
        return _is_dynamic_scale(node.inputs[1 - index])
    if node.domain != "" or node.op_type not in _PASSING_ON or (index > 0 and node.op_type != "Concat"):
        return False
    return all(is_quantization_or_rotary(output) for output in node.outputs if output.name)


def _is_dynamic_scale(value: ir.Value | None) -> bool:
    """True if `value` is the scale that DynamicQuantizeLinear computes.

    onnxruntime's `quantize_dynamic` multiplies this scale by the scale of the weights, so the other factor of the Mul
    is a quantization scale, too.
    """
    producer = None if value is None else value.producer()
    return (
        producer is not None and producer.op_type == "DynamicQuantizeLinear" and value is producer.outputs[1]
    )
