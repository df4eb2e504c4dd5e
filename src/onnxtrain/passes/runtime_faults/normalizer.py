"""Replaces the L2 Normalizer of ai.onnx.ml, which ONNX Runtime computes wrongly when it runs in place."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.tidy.replace_value import replace_node, write_before


class NormalizerPass(ir.passes.InPlacePass):
    """Rewrites `Normalizer` with norm="L2" as the equivalent LpNormalization.

    ONNX Runtime (1.32) lets the op overwrite its input if the shapes of both are known, but the kernel reads the input
    again after writing. Files seldom declare these shapes, but shape inference adds them. Expects inferred dtypes.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the model in place, including subgraphs; values keep their names."""
        nodes = [
            node
            for node in ir.traversal.RecursiveGraphIterator(model.graph)
            if (node.domain, node.op_type) == ("ai.onnx.ml", "Normalizer")
            and node.attributes.get_string("norm", "MAX") == "L2"
        ]
        for node in nodes:
            x = node.inputs[0]
            # The op converts integers and float64 to float32.
            if x is not None and x.dtype != ir.DataType.FLOAT:
                x = write_before(node, "float", "Cast", x, to=int(ir.DataType.FLOAT))
                x.type, x.shape = ir.TensorType(ir.DataType.FLOAT), node.outputs[0].shape
            y = write_before(node, "normalized", "LpNormalization", x, axis=-1, p=2)
            y.type = ir.TensorType(ir.DataType.FLOAT)
            replace_node(node, y)
        return ir.passes.PassResult(model, bool(nodes))
