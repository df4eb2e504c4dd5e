"""Turns `output_shape` into explicit padding in transposed convolutions that shrink their input."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.shapes.outdated_sizes import forget_downstream_sizes


class OutputShapePass(ir.passes.InPlacePass):
    """Replaces `output_shape` of a ConvTranspose with `pads` if an output size is smaller than the input size.

    onnx's shape inference (1.23) stops early for such nodes and returns an output with too few axes. The pads follow
    the specification of ConvTranspose. Expects static spatial sizes; other nodes are not modified.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites nodes of the main graph and its subgraphs in place."""
        modified = False
        for node in ir.traversal.RecursiveGraphIterator(model.graph):
            if node.op_type == "ConvTranspose" and node.domain == "" and "output_shape" in node.attributes:
                pads = _pads(node)
                if pads is not None:
                    node.attributes.pop("output_shape")
                    node.attributes.pop("auto_pad", None)
                    node.attributes["pads"] = ir.AttrInt64s("pads", pads)
                    forget_downstream_sizes(model.graph, node, ranks=True)
                    modified = True
        return ir.passes.PassResult(model, modified)


def _pads(node: ir.Node) -> list[int] | None:
    """Returns the padding that gives a ConvTranspose the sizes in its `output_shape`.

    Returns:
        The attribute `pads`: the padding at the beginning of each axis, then at the end of each axis. None if the node
        must not be rewritten: no output size is smaller than the input size, the input size or kernel size is unknown,
        or the padding would be negative.
    """
    (x, weight), attributes = node.inputs[:2], node.attributes
    if x is None or weight is None or x.shape is None or weight.shape is None:
        return None
    # Some models include batch and channels in output_shape; the standard has only spatial sizes.
    rank = len(x.shape) - 2
    wanted = list(attributes["output_shape"].as_ints())[-rank:]
    ones, zeros = [1] * rank, [0] * rank
    per_axis = (
        list(x.shape)[2:],
        wanted,
        attributes.get_ints("kernel_shape", list(weight.shape)[2:]),
        attributes.get_ints("strides", ones),
        attributes.get_ints("dilations", ones),
        attributes.get_ints("output_padding", zeros),
    )
    begins, ends, shrinks = [], [], False
    for size, out, kernel, stride, dilation, extra in zip(*per_axis, strict=True):
        if not isinstance(size, int) or not isinstance(kernel, int):
            return None
        total = stride * (size - 1) + extra + (kernel - 1) * dilation + 1 - out
        # If the total is negative, the output extends beyond the windows, which pads cannot express.
        if total < 0:
            return None
        shrinks |= out < size
        # If the total is odd, the larger half is at the end for SAME_UPPER, and otherwise at the beginning.
        upper = attributes.get_string("auto_pad", "NOTSET") == "SAME_UPPER"
        begins.append(total // 2 if upper else total - total // 2)
        ends.append(total - begins[-1])
    return [*begins, *ends] if shrinks else None
