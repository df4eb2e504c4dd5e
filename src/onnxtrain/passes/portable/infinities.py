"""Makes sorting and reductions correct for tensors that contain infinities."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain.passes.portable._nodes import standard_nodes
from onnxtrain.passes.tidy.replace_value import WriterBefore, replace_node, successor

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
_SETTINGS = {"keepdims": 1, "noop_with_empty_axes": 0}
"""Attributes of reductions, with their defaults."""


class InfinitiesPass(ir.passes.InPlacePass):
    """Makes TopK, ReduceMax and ReduceMin return correct results for inputs that contain infinities.

    ONNX Runtime's CUDA provider (1.31) pads the rows for TopK with the largest finite number. For a row with
    infinities, it returns indices beyond the end of the row, so nodes that use the indices read out of bounds. The pass
    makes TopK sort a copy in which large finite numbers replace the infinities.

    The provider's ReduceMax returns the lowest finite number if all elements are -inf, and its ReduceMin returns the
    largest finite number if all are inf, so fully masked rows of attention scores are not detected. The pass adds nodes
    that detect these cases and return the infinity.

    Args:
        compared_only: True to rewrite a reduction only if an Equal reads its output. This saves a second pass over the
            inputs of other reductions, but the infinities in their outputs are lost. TopK is always rewritten.
    """

    def __init__(self, *, compared_only: bool = False) -> None:
        super().__init__()
        self._compared_only = compared_only

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the model in place. Nodes of unknown dtype, e.g. in functions, are assumed to be floating point."""
        nodes = [
            node
            for op_type in ("TopK", "ReduceMax", "ReduceMin")
            for node in standard_nodes(model, op_type)
            if _dtype(node) in _FLOATS and (op_type == "TopK" or self._rewrites(node))
        ]
        for node in nodes:
            if node.op_type == "TopK":
                _sort_finite(node)
            else:
                _keep_infinity(node)
        return ir.passes.PassResult(model, bool(nodes))

    def _rewrites(self, reduction: ir.Node) -> bool:
        readers = reduction.outputs[0].consumers()
        return not self._compared_only or any(reader.op_type == "Equal" for reader in readers)


def _dtype(node: ir.Node) -> ir.DataType:
    value = node.inputs[0]
    return ir.DataType.FLOAT if value is None or value.dtype is None else value.dtype


def _sort_finite(node: ir.Node) -> None:
    """Makes a TopK sort a copy of its input in which large finite numbers replace infinities.

    The sorted values are gathered from the original input.
    """
    write, x, dtype = WriterBefore(node), node.inputs[0], _dtype(node)
    numpy = dtype.numpy()
    # Two finite numbers below the largest one, which is the padding; infinities get the outer one to keep their
    # positions.
    beyond = np.nextafter(np.finfo(numpy).max, numpy.type(0))
    most = float(np.nextafter(beyond, numpy.type(0)))
    keys = write("Clip", x, write.number(-most, dtype), write.number(most, dtype))
    for infinity, key in ((math.inf, float(beyond)), (-math.inf, -float(beyond))):
        where = write("Equal", x, write.number(infinity, dtype))
        keys = write("Where", where, write.number(key, dtype), keys)
    node.replace_input_with(0, keys)
    values = successor(node.outputs[0])
    node.outputs[0].name = f"{values.name}/keys"
    axis = node.attributes.get_int("axis", -1)
    node.append(ir.node("GatherElements", [x, node.outputs[1]], {"axis": axis}, outputs=[values]))


def _keep_infinity(node: ir.Node) -> None:
    """Makes a ReduceMax return -inf if all elements are -inf, and a ReduceMin return inf if all are inf."""
    write, x, dtype = WriterBefore(node), node.inputs[0], _dtype(node)
    infinity = write.number(-math.inf if node.op_type == "ReduceMax" else math.inf, dtype)
    only = write("Cast", write("Equal", x, infinity), to=ir.DataType.INT32)
    axes = node.inputs[1:]
    settings = {name: node.attributes.get_int(name, default) for name, default in _SETTINGS.items()}
    everywhere = write("Cast", write("ReduceMin", only, *axes, **settings), to=ir.DataType.BOOL)
    replace_node(node, write("Where", everywhere, infinity, write(node.op_type, x, *axes, **settings)))
