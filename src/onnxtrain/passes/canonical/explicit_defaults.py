"""Makes attributes explicit if onnx's shape inference gets their defaults wrong."""

from __future__ import annotations

import onnx_ir as ir


class DefaultsPass(ir.passes.InPlacePass):
    """Adds the default `onesided=1` to STFT nodes that lack the attribute, in the main graph and its subgraphs.

    onnx's shape inference (1.23) assumes a default of 0 and infers twice as many frequencies.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Adds the attribute in place."""
        modified = False
        for node in model.graph.all_nodes():
            if node.domain == "" and node.op_type == "STFT" and "onesided" not in node.attributes:
                node.attributes.add(ir.AttrInt64("onesided", 1))
                modified = True
        return ir.passes.PassResult(model, modified)
