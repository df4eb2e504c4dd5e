"""Write transposed convolutions that make images smaller by their padding."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.shapes.outdated_sizes import forget_sizes_after


class OutputShapePass(ir.passes.InPlacePass):
    """Replace the `output_shape` of a ConvTranspose by padding where one of its sizes is below that of the input.

    There shape inference (onnx 1.23) gives up half-way, and leaves a result of too few axes. The padding is as ONNX's
    `ConvTranspose` says, for sizes that are static.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place, in subgraphs too."""
        modified = False
        for node in ir.traversal.RecursiveGraphIterator(model.graph):
            if node.op_type == "ConvTranspose" and node.domain == "" and "output_shape" in node.attributes:
                pads = _pads(node)
                if pads is not None:
                    node.attributes.pop("output_shape")
                    node.attributes.pop("auto_pad", None)
                    node.attributes["pads"] = ir.AttrInt64s("pads", pads)
                    forget_sizes_after(model.graph, node, ranks=True)
                    modified = True
        return ir.passes.PassResult(model, modified)


def _pads(node: ir.Node) -> list[int] | None:
    """Returns the padding, at all beginnings and then at all ends; None where the output need not be rewritten."""
    (x, weight), given = node.inputs[:2], node.attributes
    if x is None or weight is None or x.shape is None or weight.shape is None:
        return None
    # Some runtimes' models write it with the batch and the channels.
    rank = len(x.shape) - 2
    wanted = list(given["output_shape"].as_ints())[-rank:]
    ones, zeros = [1] * rank, [0] * rank
    known = (
        list(x.shape)[2:],
        wanted,
        given.get_ints("kernel_shape", list(weight.shape)[2:]),
        given.get_ints("strides", ones),
        given.get_ints("dilations", ones),
        given.get_ints("output_padding", zeros),
    )
    begins, ends, shrinks = [], [], False
    for size, out, kernel, stride, dilation, extra in zip(*known, strict=True):
        if not isinstance(size, int) or not isinstance(kernel, int):
            return None
        total = stride * (size - 1) + extra + (kernel - 1) * dilation + 1 - out
        if total < 0:
            return None
        shrinks |= out < size
        upper = given.get_string("auto_pad", "NOTSET") == "SAME_UPPER"
        begins.append(total // 2 if upper else total - total // 2)
        ends.append(total - begins[-1])
    return [*begins, *ends] if shrinks else None
