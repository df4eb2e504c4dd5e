"""Detects MatMulNBits nodes with `g_idx` that ONNX Runtime computes incorrectly."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def fault_of_order(node: ir.Node) -> str | None:
    """Returns the reason why ONNX Runtime computes a MatMulNBits with `g_idx` incorrectly, or cannot run it.

    GPTQ checkpoints with `desc_act=True` have `g_idx`. ONNX Runtime supports most of these checkpoints, which have
    4-bit weights and zero points of 8. It also supports 4-bit weights without zero points or with floating-point zero
    points.

    Args:
        node: a MatMulNBits.

    Returns:
        The reason, e.g. "weights of 2 bits with g_idx". None if the node has no `g_idx`, or is computed correctly.
    """
    _, _, _, zero_points, order, *_ = (*node.inputs, None, None, None)
    if order is None:
        return None
    bits: int = node.attributes.get_int("bits", 4)
    # With g_idx, onnxruntime (1.32, CPU) reads 2-bit codes as 4-bit codes, has no kernel for 8 bits, and assumes that
    # packed zero points are 8.
    if bits != 4:
        return f"weights of {bits} bits with g_idx"
    if zero_points is None or zero_points.dtype != ir.DataType.UINT8:
        return None
    tensor = None if zero_points.is_graph_input() else zero_points.const_value
    # Two zero points per byte.
    if tensor is not None and np.all(tensor.numpy() == 0x88):
        return None
    return "packed zero points other than 8 with g_idx"
