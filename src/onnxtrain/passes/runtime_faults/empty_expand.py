"""Rewrites Expands to empty tensors so that ONNX Runtime does not remove them."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.tidy.constants import known_array
from onnxtrain.passes.tidy.replace_value import write_before


class EmptyExpandPass(ir.passes.InPlacePass):
    """Slices the input of an Expand to size 0 along each axis whose size is 0 in the constant target shape.

    A graph optimizer of ONNX Runtime (1.20 to 1.32, level basic) removes an Expand if no size in its constant shape is
    greater than the input's. It does not consider size 0: an Expand of `[3, 1]` to `[3, 0]` is removed, and the result
    is `[3, 1]`.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Modifies Expands of the model in place, including those in subgraphs.

        The starts, ends and axes of the inserted Slices are Constant nodes.
        """
        to_cut = {
            node: axes
            for node in ir.traversal.RecursiveGraphIterator(model.graph)
            if (node.domain, node.op_type) == ("", "Expand") and (axes := _axes_to_cut(node))
        }
        for node, axes in to_cut.items():
            empty = write_before(node, "empty_axes", "Constant", value_ints=axes)
            zeros = write_before(node, "zeros", "Constant", value_ints=[0] * len(axes))
            # Now it does no harm if the optimizer removes the Expand: its input already has size 0.
            node.replace_input_with(
                0, write_before(node, "cut", "Slice", node.inputs[0], zeros, zeros, empty)
            )
        return ir.passes.PassResult(model, bool(to_cut))


def _axes_to_cut(node: ir.Node) -> list[int]:
    """Returns the axes of an Expand's input that must be sliced to size 0.

    These are the axes whose target size is a constant 0, unless the input's size is known to be 0.
    """
    x, shape = node.inputs[0], node.inputs[1]
    target = known_array(shape)
    if target is None or x is None or x.shape is None:
        return []
    cut = _empty_axes(x.producer())
    sizes = target.tolist()
    # Number of leading axes that the Expand adds.
    before = len(sizes) - len(x.shape)
    # A symbolic size may be 1 at run time; slicing from 0 to 0 is correct for every size.
    return [
        axis
        for axis, size in enumerate(x.shape)
        if axis + before >= 0 and sizes[axis + before] == 0 != size and axis not in cut
    ]


def _empty_axes(node: ir.Node | None) -> list[int]:
    """Returns the axes that a Slice reduces to size 0, e.g. a Slice inserted by :class:`EmptyExpandPass`.

    Returns [] for other nodes. The Slice is inspected because shape inference does not know that a symbolic size
    becomes 0, e.g. when a gradient is differentiated again.
    """
    if node is None or (node.domain, node.op_type) != ("", "Slice") or len(node.inputs) != 4:
        return []
    _, starts, ends, axes = (known_array(value) for value in node.inputs)
    if starts is None or ends is None or axes is None:
        return []
    return [axis for axis, start, end in zip(axes.tolist(), starts, ends, strict=True) if start == end == 0]
