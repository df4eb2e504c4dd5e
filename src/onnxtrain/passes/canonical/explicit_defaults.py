"""Write out attributes whose defaults onnx's shape inference gets wrong."""

from __future__ import annotations

import onnx_ir as ir


class DefaultsPass(ir.passes.InPlacePass):
    """Write `onesided=1`, the default, at STFT nodes without the attribute, also in subgraphs.

    Shape inference of onnx (1.23) takes the default for 0 and infers twice as many frequencies.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Annotate in place."""
        modified = False
        for node in model.graph.all_nodes():
            if node.domain == "" and node.op_type == "STFT" and "onesided" not in node.attributes:
                node.attributes.add(ir.AttrInt64("onesided", 1))
                modified = True
        return ir.passes.PassResult(model, modified)
