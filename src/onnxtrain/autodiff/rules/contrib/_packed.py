"""Writes the product of the gradient of MatMulNBits, which reads the packed weights as integers, without a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.emitter import Emitter
from onnxtrain.functions import (
    uint4_product,
    uint4_product_of_float_zeros,
    uint8_product,
    uint8_product_of_float_zeros,
)
from onnxtrain.passes.parameters.packed_codes import packed_pairs, unpacked
from onnxtrain.passes.tidy.constants import add_constant

_TYPES = {4: ir.DataType.UINT4, 8: ir.DataType.UINT8}
_PRODUCTS = {4: uint4_product, 8: uint8_product}
_PRODUCTS_OF_FLOAT_ZEROS = {4: uint4_product_of_float_zeros, 8: uint8_product_of_float_zeros}


def product_with_weight(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value | None:
    """Writes ct·W, the cotangent of input A of a MatMulNBits, as a product that reads the packed bytes of W.

    In float32 it is a call of a function for which there is a native kernel. The function's body, and what is written
    for other dtypes, is a DequantizeLinear, which ONNX Runtime does not fold: it computes the weight in each step, when
    the cotangent is there, and frees it. A weight that is unpacked by arithmetic would be folded to float32 when a
    session is made, eight times the memory of 4 bits.

    Returns:
        The product; None if the graph computes the codes or zero points, for 2 bits, and for columns in an order of
        their own, which DequantizeLinear cannot read.
    """
    bits, size, rows, columns = (n.attr(name) for name in ("bits", "block_size", "N", "K"))
    codes, zero_points = _tensor(n.B), _tensor(n.zero_points)
    has_float_zeros = n.zero_points is not None and n.zero_points.dtype != ir.DataType.UINT8
    has_codes = codes is not None and (n.zero_points is None or has_float_zeros or zero_points is not None)
    if bits not in _TYPES or n.g_idx is not None or not has_codes:
        return None
    is_float32 = ct.dtype == n.scales.dtype == ir.DataType.FLOAT
    if has_float_zeros and not (is_float32 and n.zero_points.dtype == ir.DataType.FLOAT):
        return None
    assert codes is not None
    blocks = math.ceil(columns / size)
    name = f"{n.B.name}.blocks"
    weight = _constant(op, name, viewed(codes, _TYPES[bits], (rows, blocks * size)))
    if has_float_zeros:
        composite = _PRODUCTS_OF_FLOAT_ZEROS[bits]
        product = op.call(composite, ct, weight, n.scales, n.zero_points, block_size=size)
    else:
        zeros = _constant(op, f"{name}.zero_points", _zero_points(zero_points, bits, rows, blocks, name))
        if is_float32:
            product = op.call(_PRODUCTS[bits], ct, weight, n.scales, zeros, block_size=size)
        else:
            # Without waiting for the cotangent, the float weights of all layers would be there before the first of them
            # is needed.
            scales = op.reshape_after(n.scales, op.const([rows, blocks]), ct)
            product = op.MatMul(ct, op.DequantizeLinear(weight, scales, zeros, axis=1, block_size=size))
    # The last block of a row may be longer than the columns that are left.
    return product if blocks * size == columns else op.Slice(product, [0], [columns], [-1])


def viewed(tensor: ir.TensorProtocol, dtype: ir.DataType, shape: Sequence[int]) -> ir.TensorProtocol:
    """Returns the bytes of a tensor as a tensor of another dtype and shape; both share file or memory."""
    if isinstance(tensor, ir.ExternalTensor):
        return ir.ExternalTensor(
            tensor.location,
            tensor.offset,
            tensor.length,
            dtype,
            shape=ir.Shape(shape),
            name=str(tensor.name),
            base_dir=tensor.base_dir,
        )
    # ONNX packs integers of 4 bits as MatMulNBits does: two in a byte, the first one in the low half.
    array = np.ascontiguousarray(tensor.numpy()).reshape(-1)
    if dtype == ir.DataType.UINT4:
        return ir.PackedTensor(array, dtype, shape=ir.Shape(shape))
    return ir.Tensor(array.reshape(tuple(shape)), dtype=dtype)


def _tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Returns the tensor of a constant; None for a value that the graph or the device computes."""
    return None if value is None or value.is_graph_input() else value.const_value


def _zero_points(
    tensor: ir.TensorProtocol | None, bits: int, rows: int, blocks: int, name: str
) -> ir.TensorProtocol:
    """Returns the zero points as DequantizeLinear wants them: [N, blocks], packed without gaps."""
    if tensor is None:
        # Without zero points the codes are around the middle of their range.
        values = np.full((rows, blocks), 2 ** (bits - 1), np.uint8)
    else:
        # Each row of the kernel's zero points begins with a new byte.
        values = unpacked(tensor.numpy().reshape(rows, -1), bits)[:, :blocks]
    if bits == 8:
        return ir.Tensor(values.copy(), dtype=ir.DataType.UINT8, name=name)
    return ir.PackedTensor(packed_pairs(values), ir.DataType.UINT4, shape=ir.Shape((rows, blocks)))


def _constant(op: Emitter, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """Adds an initializer, which is no parameter."""
    tensor.name = op.unique_name(name)
    return add_constant(op.graph, tensor)
