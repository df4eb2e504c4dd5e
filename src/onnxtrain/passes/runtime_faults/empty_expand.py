"""Rewrite Expands to tensors without elements so that ONNX Runtime does not drop them."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.tidy.constants import known_array
from onnxtrain.passes.tidy.replace_value import write_before


class EmptyExpandPass(ir.passes.InPlacePass):
    """Cut the input of an Expand to size 0 along the axes that a constant shape gives size 0.

    A graph optimizer of ONNX Runtime (1.20 to 1.32, level basic) drops an Expand if no size in its constant shape is
    greater than the input's. It forgets size 0: an Expand of `[3, 1]` to `[3, 0]` is dropped, and the result is
    `[3, 1]`.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Write a Slice before such nodes, in place, also in subgraphs; the constants are Constant nodes."""
        to_cut = {
            node: axes
            for node in ir.traversal.RecursiveGraphIterator(model.graph)
            if (node.domain, node.op_type) == ("", "Expand") and (axes := _axes_to_cut(node))
        }
        for node, axes in to_cut.items():
            empty = write_before(node, "empty_axes", "Constant", value_ints=axes)
            zeros = write_before(node, "zeros", "Constant", value_ints=[0] * len(axes))
            # The optimizer may then drop the Expand: its input has the size 0 already.
            node.replace_input_with(
                0, write_before(node, "cut", "Slice", node.inputs[0], zeros, zeros, empty)
            )
        return ir.passes.PassResult(model, bool(to_cut))


def _axes_to_cut(node: ir.Node) -> list[int]:
    """Return the axes of an Expand's input that a constant shape gives size 0 and that may have size 1."""
    x, shape = node.inputs[0], node.inputs[1]
    target = known_array(shape)
    if target is None or x is None or x.shape is None:
        return []
    cut = _empty_axes(x.producer())
    sizes = target.tolist()
    # Axes that the Expand adds in front of those of its input.
    before = len(sizes) - len(x.shape)
    # A symbolic size may turn out to be 1, and a cut from 0 to 0 is right for every size.
    return [
        axis
        for axis, size in enumerate(x.shape)
        if axis + before >= 0 and sizes[axis + before] == 0 != size and axis not in cut
    ]


def _empty_axes(node: ir.Node | None) -> list[int]:
    """Return the axes that a Slice from 0 to 0, such as that of :class:`EmptyExpandPass`, leaves without elements.

    Shape inference does not know that a symbolic size becomes 0, e.g. where a gradient is differentiated again.
    """
    if node is None or (node.domain, node.op_type) != ("", "Slice") or len(node.inputs) != 4:
        return []
    _, starts, ends, axes = (known_array(value) for value in node.inputs)
    if starts is None or ends is None or axes is None:
        return []
    return [axis for axis, start, end in zip(axes.tolist(), starts, ends, strict=True) if start == end == 0]
