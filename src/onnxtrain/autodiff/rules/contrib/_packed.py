"""Emits the matrix product of MatMulNBits' VJP, which reads the packed weights in place, without a copy."""

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
    """Returns ct·W, the cotangent of input A of a MatMulNBits, computed from the packed bytes of W.

    In float32, the product is a call to a composite op with a native kernel. The composite's body, and the nodes
    emitted for other dtypes, unpack the weight with DequantizeLinear, which ONNX Runtime does not constant-fold: each
    step dequantizes the weight when the cotangent is available, and frees it afterwards. If arithmetic ops unpacked the
    weight, ONNX Runtime would fold them when it creates the session, and keep the weight in float32: eight times the
    size of 4-bit codes.

    Returns:
        The product, or None if the node is not supported: its codes or integer zero points are not constant, the codes
        have 2 bits, there is a `g_idx`, or the zero points are floating point and `ct`, the scales and the zero points
        are not all float32.
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
            # Without this dependency on the cotangent, the weights of all layers could be dequantized long before they
            # are needed.
            scales = op.reshape_after(n.scales, op.const([rows, blocks]), ct)
            product = op.MatMul(ct, op.DequantizeLinear(weight, scales, zeros, axis=1, block_size=size))
    # The last block of a row may extend beyond the last column.
    return product if blocks * size == columns else op.Slice(product, [0], [columns], [-1])


def viewed(tensor: ir.TensorProtocol, dtype: ir.DataType, shape: Sequence[int]) -> ir.TensorProtocol:
    """Reinterprets the bytes of a tensor as a different dtype and shape; both tensors share the file or memory."""
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
    # ONNX packs 4-bit integers like MatMulNBits: two per byte, the first in the low half.
    array = np.ascontiguousarray(tensor.numpy()).reshape(-1)
    if dtype == ir.DataType.UINT4:
        return ir.PackedTensor(array, dtype, shape=ir.Shape(shape))
    return ir.Tensor(array.reshape(tuple(shape)), dtype=dtype)


def _tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Returns the tensor of a constant; None for graph inputs and computed values."""
    return None if value is None or value.is_graph_input() else value.const_value


def _zero_points(
    tensor: ir.TensorProtocol | None, bits: int, rows: int, blocks: int, name: str
) -> ir.TensorProtocol:
    """Returns zero points in the layout of DequantizeLinear: [rows, blocks], packed without gaps.

    Args:
        tensor: zero points in the kernel's layout, in which each row begins at a new byte. None for the kernel's
            default, the middle of the range.
        bits: bits per zero point, 4 or 8.
        rows: number of rows of the weight.
        blocks: number of blocks per row.
        name: name for the tensor.
    """
    if tensor is None:
        # Without zero points, the codes are centered at the middle of their range.
        values = np.full((rows, blocks), 2 ** (bits - 1), np.uint8)
    else:
        # In the kernel's layout, each row of zero points begins at a new byte.
        values = unpacked(tensor.numpy().reshape(rows, -1), bits)[:, :blocks]
    if bits == 8:
        return ir.Tensor(values.copy(), dtype=ir.DataType.UINT8, name=name)
    return ir.PackedTensor(packed_pairs(values), ir.DataType.UINT4, shape=ir.Shape((rows, blocks)))


def _constant(op: Emitter, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """Adds a tensor as an initializer that is not a trainable parameter."""
    tensor.name = op.unique_name(name)
    return add_constant(op.graph, tensor)
