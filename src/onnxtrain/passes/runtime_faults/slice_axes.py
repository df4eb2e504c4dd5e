"""Makes the default axes of a Slice explicit if its steps are computed at run time."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.tidy.constants import known_array
from onnxtrain.passes.tidy.replace_value import write_before


class SliceAxesPass(ir.passes.InPlacePass):
    """Makes the default axes, 0 to n - 1, explicit for a Slice with n constant starts and non-constant steps.

    A graph optimizer of ONNX Runtime (1.20 to 1.32, level basic) removes a Slice without axes that reads every
    axis from 0 to the end. It ignores non-constant steps: `x[0::step]` becomes `x`.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Adds the axes in the main graph and its subgraphs, in place, as Constant nodes."""
        defaults = {
            node: axes
            for node in ir.traversal.RecursiveGraphIterator(model.graph)
            if (node.domain, node.op_type) == ("", "Slice") and (axes := _default_axes(node))
        }
        for node, axes in defaults.items():
            node.replace_input_with(3, write_before(node, "axes", "Constant", value_ints=axes))
        return ir.passes.PassResult(model, bool(defaults))


def _default_axes(node: ir.Node) -> list[int]:
    """Returns the default axes of a Slice that needs explicit axes, e.g. [0, 1], or [] for any other Slice."""
    # The optimizer keeps a Slice with non-constant starts, because these may not be 0.
    if len(node.inputs) < 5:
        return []
    starts, axes, steps = node.inputs[1], node.inputs[3], node.inputs[4]
    if starts is None or axes is not None or steps is None:
        return []
    constant_starts = known_array(starts)
    if constant_starts is None or known_array(steps) is not None:
        return []
    return list(range(constant_starts.size))
