"""Turns a reversed exclusive CumSum into a shifted inclusive CumSum."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.portable._nodes import constant_input, standard_nodes
from onnxtrain.passes.tidy.replace_value import WriterBefore, replace_node

_END = 2**63 - 1


class CumSumPass(ir.passes.InPlacePass):
    """Replaces an exclusive reversed CumSum with an inclusive reversed one, shifted by one element and padded with 0.

    The default bundle of onnxruntime-web (JSEP, 1.30) silently computes wrong exclusive reversed sums on WebGPU. The
    new values are bit-equal: element i of the exclusive sum is element i + 1 of the inclusive sum. Nodes with a
    computed axis are not modified, because Concat requires a constant axis.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites nodes of the model in place."""
        nodes = [node for node in standard_nodes(model, "CumSum") if _is_both(node)]
        for node in nodes:
            axis = constant_input(node, 1)
            assert axis is not None
            _shift(node, int(axis.item()))
        return ir.passes.PassResult(model, bool(nodes))


def _is_both(node: ir.Node) -> bool:
    flags = (node.attributes.get_int(name, 0) for name in ("reverse", "exclusive"))
    return all(flags) and constant_input(node, 1) is not None


def _shift(node: ir.Node, axis: int) -> None:
    """Replaces an exclusive reversed CumSum along `axis` with an inclusive one, shifted by one element."""
    write, x = WriterBefore(node), node.inputs[0]
    sums = write("CumSum", x, node.inputs[1], reverse=1)
    rest = write("Slice", sums, [1], [_END], [axis])
    # As many zeros as x has first rows along the axis: none if the axis is empty, else one.
    first = write("Slice", x, [0], [1], [axis])
    # CastLike, because the dtype may be unknown in a function.
    zeros = write("Expand", write("CastLike", 0, x), write("Shape", first))
    replace_node(node, write("Concat", rest, zeros, axis=axis))
