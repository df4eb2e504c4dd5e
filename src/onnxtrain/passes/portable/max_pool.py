"""Computes the Indices output of MaxPool with ArgMax."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain.passes.portable._nodes import standard_nodes
from onnxtrain.passes.tidy.replace_value import WriterBefore, stand_in


class MaxPoolIndicesPass(ir.passes.InPlacePass):
    """Removes the Indices output of MaxPool, and computes the indices from strided slices of the input instead.

    ONNX Runtime's WebGPU provider (1.30) fails when it runs a MaxPool that returns indices, which gradients need. The
    pass stacks one slice of the input per position in the window. ArgMax over the stack finds the first maximum, as
    MaxPool does, and its position in the window determines the index in the input.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the model in place. Nodes with auto_pad, dilations or column-major indices are not modified."""
        nodes = [node for node in standard_nodes(model, "MaxPool") if _fits(node)]
        for node in nodes:
            indices = _indices(node)
            indices.type, indices.shape = ir.TensorType(ir.DataType.INT64), node.outputs[1].shape
            stand_in(node.outputs[1], indices, _after(node))
            node.resize_outputs(1)
        return ir.passes.PassResult(model, bool(nodes))


def _fits(node: ir.Node) -> bool:
    if len(node.outputs) < 2 or not (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        return False
    row_major = not node.attributes.get_int("storage_order", 0)
    dilated = any(size > 1 for size in node.attributes.get_ints("dilations", []))
    # A dilated window may be entirely in the padding; its index is undefined.
    return row_major and not dilated and node.attributes.get_string("auto_pad", "NOTSET") == "NOTSET"


def _after(node: ir.Node) -> ir.Node:
    """Returns the node after `node`, before which readers of `node` can be inserted.

    If `node` is the last node, an Identity is appended and returned.
    """
    graph = node.graph
    assert graph is not None
    nodes = list(graph)
    later = nodes[nodes.index(node) + 1 :]
    if not later:
        later = [ir.node("Identity", [node.outputs[0]])]
        graph.append(later[0])
    return later[0]


def _indices(node: ir.Node) -> ir.Value:
    """Emits nodes that compute the Indices output of a MaxPool, int64 with the shape of its first output."""
    write = WriterBefore(_after(node))
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    kernel = list(node.attributes.get_ints("kernel_shape"))
    rank = len(kernel)
    strides = list(node.attributes.get_ints("strides", [1] * rank))
    pads = list(node.attributes.get_ints("pads", [0] * (2 * rank)))
    padded = any(pads) or bool(node.attributes.get_int("ceil_mode", 0))
    source = _padded(write, x, kernel, pads) if padded else x
    axes = list(range(2, 2 + rank))
    # End of the slice of the first elements of all windows, along each axis.
    last = write("Mul", write("Sub", write("Shape", y, start=2), 1), strides)
    end = write("Add", last, 1)
    places = [[int(along) for along in offset] for offset in np.ndindex(*kernel)]
    taps = [write("Slice", source, place, write("Add", end, place), axes, strides) for place in places]
    stack = write(
        "Reshape", write("Concat", *taps, axis=0), write("Concat", [len(taps)], write("Shape", y), axis=0)
    )
    best = write("ArgMax", stack, axis=0, keepdims=0)
    # Channels are numbered across all samples, [batch, channels, 1, ...], because indices refer to the whole input.
    planes = write.range(0, write("Mul", write.size(x, 0), write.size(x, 1)))
    result = write("Reshape", planes, write("Concat", write("Shape", x, end=2), [1] * rank, axis=0))
    for axis in range(rank):
        windows = write("Mul", write.range(0, write.size(y, 2 + axis)), strides[axis])
        first = write("Reshape", write("Sub", windows, pads[axis]), [-1] + [1] * (rank - 1 - axis))
        inside = write("Mod", write("Div", best, math.prod(kernel[axis + 1 :])), kernel[axis])
        along, size = write("Add", first, inside), write.size(x, 2 + axis)
        if padded:
            # If a window contains only minus infinity, its first position may be padding.
            along = write("Max", write("Min", along, write("Sub", size, 1)), 0)
        result = write("Add", write("Mul", result, size), along)
    return result


def _padded(write: WriterBefore, x: ir.Value, kernel: list[int], pads: list[int]) -> ir.Value:
    """Pads `x` with minus infinity: by `pads`, and by one more window at the end of each spatial axis.

    With `ceil_mode`, the last window may extend beyond `pads`.
    """
    rank = len(kernel)
    ends = [pad + size for pad, size in zip(pads[rank:], kernel, strict=True)]
    lowest = write("CastLike", write.number(-math.inf, ir.DataType.FLOAT), x)
    return write("Pad", x, [0, 0, *pads[:rank], 0, 0, *ends], lowest)
