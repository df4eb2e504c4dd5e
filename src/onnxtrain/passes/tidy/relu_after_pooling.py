"""Moves a Relu after the max pooling that reads it."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.tidy.reads import read_once


class ReluAfterMaxPoolPass(ir.passes.InPlacePass):
    """Rewrites MaxPool(Relu(x)) as Relu(MaxPool(x)) if nothing else reads the Relu and the indices are unread.

    Relu is monotonic, so the values are the same. So are the gradients: in a window with a positive element, both
    orders select the first maximum, and in all other windows both gradients are zero. The Relu and the mask of its
    gradient then have fewer elements, a quarter for windows of 2 x 2.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the model in place; intermediate values are renamed."""
        modified = False
        for pool in tuple(model.graph):
            relu = _relu_before(pool)
            if relu is None:
                continue
            source, pooled = relu.inputs[0], pool.outputs[0]
            assert source is not None
            after = ir.Value(name=f"{pooled.name}_relu", type=pooled.type, shape=pooled.shape)
            pooled.replace_all_uses_with(after)
            pool.replace_input_with(0, source)
            model.graph.remove(relu, safe=True)
            model.graph.insert_after(pool, ir.Node("", "Relu", [pooled], outputs=[after], name=relu.name))
            modified = True
        return ir.passes.PassResult(model, modified)


def _relu_before(node: ir.Node) -> ir.Node | None:
    """Returns the Relu that a MaxPool reads, or None if it must not be moved after the MaxPool."""
    if node.op_type != "MaxPool" or node.domain != "" or node.outputs[0].is_graph_output():
        return None
    # The indices may differ: in a window without positive elements, all outputs of the Relu are equal.
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        return None
    value = node.inputs[0]
    relu = value.producer() if value is not None else None
    if value is None or relu is None or relu.op_type != "Relu" or relu.domain != "":
        return None
    return relu if read_once(value) else None
