"""Replace the L2 Normalizer of ai.onnx.ml, which ONNX Runtime computes wrongly in place."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.tidy.replace_value import replace_node, write_before


class NormalizerPass(ir.passes.InPlacePass):
    """Rewrite `Normalizer` with norm="L2" as LpNormalization, which computes the same.

    ONNX Runtime (1.32) lets the op write to the memory of its input once it knows the shapes of both, and the kernel
    then reads what it has written. Files seldom declare these shapes; models that passes have annotated do. Expects
    inferred dtypes.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place, in subgraphs too; values keep their names."""
        nodes = [
            node
            for node in ir.traversal.RecursiveGraphIterator(model.graph)
            if (node.domain, node.op_type) == ("ai.onnx.ml", "Normalizer")
            and node.attributes.get_string("norm", "MAX") == "L2"
        ]
        for node in nodes:
            x = node.inputs[0]
            # Integers and float64 are read as float32.
            if x is not None and x.dtype != ir.DataType.FLOAT:
                x = write_before(node, "float", "Cast", x, to=int(ir.DataType.FLOAT))
                x.type, x.shape = ir.TensorType(ir.DataType.FLOAT), node.outputs[0].shape
            y = write_before(node, "normalized", "LpNormalization", x, axis=-1, p=2)
            y.type = ir.TensorType(ir.DataType.FLOAT)
            replace_node(node, y)
        return ir.passes.PassResult(model, bool(nodes))
