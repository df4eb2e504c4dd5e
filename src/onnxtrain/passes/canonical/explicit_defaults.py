"""Write attributes whose defaults shape inference overlooks."""

from __future__ import annotations

import onnx_ir as ir


class DefaultsPass(ir.passes.InPlacePass):
    """Write `onesided=1`, its default, at STFT nodes: shape inference of onnx (1.23) takes 0 for it."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Annotate in place."""
        modified = False
        for node in model.graph.all_nodes():
            if node.domain == "" and node.op_type == "STFT" and "onesided" not in node.attributes:
                node.attributes.add(ir.AttrInt64("onesided", 1))
                modified = True
        return ir.passes.PassResult(model, modified)
