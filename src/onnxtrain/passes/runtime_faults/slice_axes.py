"""Write out the axes of a Slice whose steps are computed at run time."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.tidy.constants import known_array
from onnxtrain.passes.tidy.replace_value import write_before


class SliceAxesPass(ir.passes.InPlacePass):
    """Write out the default axes, 0 to n - 1, of a Slice with n constant starts and steps that are not constant.

    A graph optimizer of ONNX Runtime (1.20 to 1.32, level basic) drops a Slice without axes that goes from 0 to the end
    of every axis. It does not look at steps that are not constant: `x[0::step]` becomes `x`.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Add the axes in place, also in subgraphs; they are Constant nodes."""
        defaults = {
            node: axes
            for node in ir.traversal.RecursiveGraphIterator(model.graph)
            if (node.domain, node.op_type) == ("", "Slice") and (axes := _default_axes(node))
        }
        for node, axes in defaults.items():
            node.replace_input_with(3, write_before(node, "axes", "Constant", value_ints=axes))
        return ir.passes.PassResult(model, bool(defaults))


def _default_axes(node: ir.Node) -> list[int]:
    """Return the default axes of a Slice that needs them written out, e.g. [0, 1]; [] for any other Slice."""
    # The optimizer keeps a Slice whose starts are not constant, as it cannot tell that they are 0.
    if len(node.inputs) < 5:
        return []
    starts, axes, steps = node.inputs[1], node.inputs[3], node.inputs[4]
    if starts is None or axes is not None or steps is None:
        return []
    constant_starts = known_array(starts)
    if constant_starts is None or known_array(steps) is not None:
        return []
    return list(range(constant_starts.size))
