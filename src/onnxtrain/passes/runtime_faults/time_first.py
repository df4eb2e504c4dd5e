"""Rewrites recurrent layers with layout=1 (batch first) as layers with layout=0 (time first)."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.op_facts import RECURRENT
from onnxtrain.passes.tidy.replace_value import successor, write_before

# Swaps the first two axes: batch and time of X, batch and directions of the states.
_SEQUENCES_FIRST = (1, 0, 2)
# Permutes Y from [time, directions, batch, hidden] to [batch, time, directions, hidden].
_BATCH_FIRST = (2, 0, 1, 3)
# Indices of X, initial_h and initial_c.
_BATCHED_INPUTS = (0, 5, 6)


class TimeFirstPass(ir.passes.InPlacePass):
    """Rewrites GRU, LSTM and RNN with layout=1 as the layer with layout=0 between transposes.

    ONNX Runtime (1.20 to 1.32) has no kernels for layout=1.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the model in place, including subgraphs; the names of outputs are kept."""
        layers = [
            node
            for node in ir.traversal.RecursiveGraphIterator(model.graph)
            if node.domain == "" and node.op_type in RECURRENT and bool(node.attributes.get_int("layout", 0))
        ]
        for node in layers:
            _rewrite(node)
        return ir.passes.PassResult(model, bool(layers))


def _rewrite(node: ir.Node) -> None:
    """Rewrites a layer to layout=0, with a Transpose of each input and output that has a batch axis."""
    for index in _BATCHED_INPUTS:
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is not None:
            swapped = write_before(node, None, "Transpose", value, perm=_SEQUENCES_FIRST)
            swapped.type = value.type
            node.replace_input_with(index, swapped)
    attributes = [attribute for attribute in node.attributes.values() if attribute.name != "layout"]
    # A new node, because the old one keeps its outputs and their readers until the transposes replace them.
    layer = ir.Node(
        node.domain, node.op_type, node.inputs, attributes, num_outputs=len(node.outputs), name=node.name
    )
    node.prepend([layer])
    for index, (old, new) in enumerate(zip(node.outputs, layer.outputs, strict=True)):
        # An omitted output has an empty name.
        if not old.name:
            new.name = ""
            continue
        new.name, new.type = f"{old.name}_time_first", old.type
        perm = _SEQUENCES_FIRST if index else _BATCH_FIRST
        node.prepend(ir.node("Transpose", [new], {"perm": perm}, outputs=[successor(old)]))
    assert node.graph is not None
    node.graph.remove(node, safe=True)
