"""Write the axes of a Slice whose steps are a run-time input."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.tidy.replace_value import write_before


class SliceAxesPass(ir.passes.InPlacePass):
    """Write out the default axes, 0 to n - 1, of a Slice with n constant starts and steps that are no constants.

    A graph optimizer of ONNX Runtime (1.32, level basic) drops a Slice from 0 to the end of each axis if its axes are
    left out, and looks at the steps only if they are constants: `x[0::2]` with the step as an input is then `x`.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Add the axes in place, also in subgraphs; they are Constant nodes."""
        nodes = [node for node in ir.traversal.RecursiveGraphIterator(model.graph) if _lacks_axes(node)]
        for node in nodes:
            starts = node.inputs[1]
            tensor = None if starts is None else _constant(starts)
            assert tensor is not None  # as `_lacks_axes` has asked
            axes = list(range(tensor.size))
            node.replace_input_with(3, write_before(node, "axes", "Constant", value_ints=axes))
        return ir.passes.PassResult(model, bool(nodes))


def _lacks_axes(node: ir.Node) -> bool:
    """Return whether a node is a Slice with constant starts, no axes, and steps that are no constants."""
    if (node.domain, node.op_type) != ("", "Slice") or len(node.inputs) < 5 or node.inputs[3] is not None:
        return False
    starts, steps = node.inputs[1], node.inputs[4]
    if starts is None or steps is None:
        return False
    return _constant(steps) is None and _constant(starts) is not None


def _constant(value: ir.Value) -> ir.TensorProtocol | None:
    return ir.convenience.get_const_tensor(value)
