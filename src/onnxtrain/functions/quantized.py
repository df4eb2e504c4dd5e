"""Defines matrix products with block-quantized weights: 2, 4 or 8-bit integers, a scale and a zero point per block.

A stock runtime dequantizes the whole weight to float32 before each product. The native kernels dequantize a few columns
at a time, which stay in the cache.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import AttributeRef, Emitter

from ._composite import composite

_MS = "com.microsoft"
_INT, _UINT4, _UINT8 = ir.AttributeType.INT, ir.DataType.UINT4, ir.DataType.UINT8
_BLOCK_SIZE = {"block_size": _INT}
_PRODUCT = ["x", "codes", "scales", "zero_points"]
_SIZES = {"K": _INT, "N": _INT, "bits": _INT, "block_size": _INT}


def _product(
    op: Emitter,
    x: ir.Value,
    codes: ir.Value,
    scales: ir.Value,
    zero_points: ir.Value,
    *,
    block_size: AttributeRef,
) -> ir.Value:
    """Computes X·W with a block-quantized weight W = scales·(codes - zero_points), which has one row per output.

    This is the VJP of MatMulNBits, X·Wᵀ, with respect to its input. It is exact up to the rounding of the float32
    product.

    x: float [..., N]; codes: [N, blocks·block_size]; scales: float, N·blocks elements in any shape; zero_points: [N,
    blocks], in the dtype of the codes, which is part of the op's name.
    """
    weight = op.DequantizeLinear(
        codes, _scales_after(op, scales, x), zero_points, axis=1, block_size=block_size
    )
    return op.MatMul(x, weight)


def _product_of_float_zeros(
    op: Emitter,
    x: ir.Value,
    codes: ir.Value,
    scales: ir.Value,
    zero_points: ir.Value,
    *,
    block_size: AttributeRef,
) -> ir.Value:
    """Computes X·W like `_product`, but with floating-point zero points: N·blocks elements in any shape."""
    blocks = _scales_after(op, scales, x)
    # DequantizeLinear requires zero points of the codes' dtype, so here, with scales of 1, it only casts the codes to
    # float.
    integers = op.DequantizeLinear(codes, op.ones_like(blocks), axis=1, block_size=block_size)
    by_block = op.Reshape(integers, op.Concat(op.Shape(blocks), [-1], axis=0))
    columns = [op.Unsqueeze(op.Reshape(value, op.Shape(blocks)), [2]) for value in (zero_points, scales)]
    weight = op.Mul(op.Sub(by_block, columns[0]), columns[1])
    return op.MatMul(x, op.Reshape(weight, op.Shape(integers)))


def _scales_after(op: Emitter, scales: ir.Value, x: ir.Value) -> ir.Value:
    """Reshapes the scales to [N, blocks], for x `[..., N]`, with a data dependency on x.

    The dependency delays dequantization of the weight until x is computed.
    """
    # Without this dependency on the cotangent, the weights of all layers could be dequantized long before they are
    # needed, and ONNX Runtime would constant-fold them to float weights when the session is created. N is taken from
    # `x`, because ONNX Runtime (1.32) has no Shape kernel for 4-bit integers.
    return op.reshape_after(scales, op.Concat(op.Shape(x, start=-1), [-1], axis=0), x)


uint4_product = composite(
    "Uint4Product", _PRODUCT, _BLOCK_SIZE, dtypes={"codes": _UINT4, "zero_points": _UINT4}
)(_product)
uint8_product = composite(
    "Uint8Product", _PRODUCT, _BLOCK_SIZE, dtypes={"codes": _UINT8, "zero_points": _UINT8}
)(_product)
uint4_product_of_float_zeros = composite(
    "Uint4ProductFloatZeros", _PRODUCT, _BLOCK_SIZE, dtypes={"codes": _UINT4}
)(_product_of_float_zeros)
uint8_product_of_float_zeros = composite(
    "Uint8ProductFloatZeros", _PRODUCT, _BLOCK_SIZE, dtypes={"codes": _UINT8}
)(_product_of_float_zeros)


def _matmul_nbits(op: Emitter, *inputs: ir.Value, **attributes: AttributeRef) -> ir.Value:
    """Computes X·Wᵀ like com.microsoft's MatMulNBits, with the same inputs and attributes.

    x: float [..., K]; codes: uint8 [N, blocks, block_size·bits/8]; scales: float [N, blocks]; zero_points: packed uint8
    [N, ceil(blocks·bits/8)], or floats, depending on the op; optional.
    """
    references = [ir.RefAttr(name, name, attribute.type) for name, attribute in attributes.items()]
    node = ir.Node(_MS, "MatMulNBits", inputs, references)
    op.graph.append(node)
    op.graph.opset_imports[_MS] = 1
    y = node.outputs[0]
    y.name, y.type = op.unique_name("y"), inputs[0].type
    return y


packed_matmul = composite("PackedMatMul", _PRODUCT, _SIZES, dtypes={"codes": _UINT8, "zero_points": _UINT8})(
    _matmul_nbits
)
packed_matmul_of_float_zeros = composite(
    "PackedMatMulFloatZeros", _PRODUCT, _SIZES, dtypes={"codes": _UINT8}
)(_matmul_nbits)
