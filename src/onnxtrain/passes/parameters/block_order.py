"""Tells which products with rows in an order of their own ONNX Runtime computes otherwise than they are defined."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def fault_of_order(node: ir.Node) -> str | None:
    """Names what ONNX Runtime's kernel does not compute as defined in a MatMulNBits with `g_idx`.

    Files of GPTQ with `desc_act=True` have such an order. In most of them all zero points are 8, which the kernel
    computes as defined, as it does floating-point zero points and none.

    Args:
        node: a MatMulNBits.

    Returns:
        E.g. "weights of 2 bits with g_idx". None for a node without `g_idx`, or that is computed as defined.
    """
    _, _, _, zero_points, order, *_ = (*node.inputs, None, None, None)
    if order is None:
        return None
    bits: int = node.attributes.get_int("bits", 4)
    # onnxruntime 1.32, CPU: with g_idx, codes of 2 bits are read as codes of 4, there is no kernel for 8 bits, and
    # packed zero points are taken for 8.
    if bits != 4:
        return f"weights of {bits} bits with g_idx"
    if zero_points is None or zero_points.dtype != ir.DataType.UINT8:
        return None
    tensor = None if zero_points.is_graph_input() else zero_points.const_value
    # Two zero points in a byte.
    if tensor is not None and np.all(tensor.numpy() == 0x88):
        return None
    return "packed zero points other than 8 with g_idx"
