"""Rewrites Dropout as multiplication by a mask computed by integer ops, so that every host drops the same elements."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.passes.parameters.training_mode import trains
from onnxtrain.passes.portable._nodes import constant_input, standard_nodes
from onnxtrain.passes.portable._squares import ELEMENTS, Squares
from onnxtrain.passes.tidy.replace_value import WriterBefore, replace_node, stand_in


def remove_idle_dropout(model: ir.Model) -> None:
    """Replaces inference-mode Dropout with its input, and its mask output with ones, in place.

    onnxruntime-web's bundles with WebGPU have no Dropout.
    """
    for node in standard_nodes(model, "Dropout"):
        write, data = WriterBefore(node), node.inputs[0]
        if data is None or trains(node):
            continue
        mask = None
        if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
            mask = write("Expand", write("Cast", 1, to=ir.DataType.BOOL), write("Shape", data))
        _replace(node, write("Identity", data), mask)


def _replace(node: ir.Node, result: ir.Value, mask: ir.Value | None) -> None:
    """Removes a Dropout and redirects readers of its outputs to `result` and `mask`."""
    if mask is not None and len(node.outputs) > 1:
        # Gradient rules read dtypes and shapes before these are inferred again.
        mask.type, mask.shape = ir.TensorType(ir.DataType.BOOL), result.shape or node.outputs[0].shape
        stand_in(node.outputs[1], mask, node)
    node.resize_outputs(1)
    replace_node(node, result)


def write_mask(node: ir.Node, key: ir.Value, number: int) -> None:
    """Replaces a Dropout with data * (mask ? 1 / (1 - ratio) : 0), where random integers determine the mask.

    Args:
        node: a Dropout in training mode, or with a mode that is computed at run time.
        key: key of the random number generator, see :meth:`Squares.key`.
        number: index of the node among the model's random ops; each index has its own counters.
    """
    write, data, mode = WriterBefore(node), node.inputs[0], node.inputs[2]
    assert data is not None
    dtype = data.dtype or ir.DataType.FLOAT
    threshold, scale = _limits(node, dtype)
    count = write("Reshape", write("Size", data), [1])
    words = Squares(node).words(count, number * ELEMENTS, key)
    kept = write("GreaterOrEqual", words, threshold)
    mask = write("Reshape", kept, write("Shape", data), allowzero=1)
    if constant_input(node, 2) is None:
        # The mode is computed at run time: in inference mode everything is kept unchanged.
        mask = write("Or", mask, write("Not", mode))
        scale = write("Where", mode, scale, write.number(1, dtype))
    factor = write("Where", mask, scale, write.number(0, dtype))
    factor.type, factor.shape = ir.TensorType(dtype), data.shape
    result = write("Mul", data, factor)
    result.shape = data.shape
    _replace(node, result, mask)


def _limits(node: ir.Node, dtype: ir.DataType) -> tuple[ir.Value, ir.Value]:
    """Emits the threshold and the scale by which a Dropout drops and scales elements, computed from its ratio.

    Returns:
        The threshold ratio * 2³², int64: an element is kept if its random integer is at least this large. The scale
        1 / (1 - ratio) of kept elements, in `dtype`; 0 if the ratio is 1.
    """
    write = WriterBefore(node)
    absent = len(node.inputs) < 2 or node.inputs[1] is None
    ratio = np.array(0.5) if absent else constant_input(node, 1)
    if ratio is not None:
        number = float(ratio.item())
        # As in PyTorch, a ratio of 1 drops everything; 1 / (1 - ratio) would be infinite.
        return write("Identity", round(number * 2**32)), write.number(
            1 / (1 - number) if number < 1 else 0, dtype
        )
    # The ratio is a frozen parameter or an input of the model, which devices may set.
    wide = write("Cast", node.inputs[1], to=ir.DataType.FLOAT)
    one, words, none = (write.number(number, ir.DataType.FLOAT) for number in (1, 2**32, 0))
    limit = write("Cast", write("Mul", wide, words), to=ir.DataType.INT64)
    share = write("Where", write("Less", wide, one), write("Reciprocal", write("Sub", one, wide)), none)
    return limit, write("Cast", share, to=dtype)
