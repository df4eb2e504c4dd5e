"""Rewrites products of a transposed tensor and a vector as products with a one-column matrix."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.tidy.replace_value import successor, write_before


class ColumnVectorPass(ir.passes.InPlacePass):
    """Rewrites the product A^T v of a transposed tensor and a vector as a product with a one-column matrix.

    ONNX Runtime (1.20 to 1.32, at optimization level extended or higher) fuses the Transpose into the product but then
    computes A v, without an error if A is square. Expects inferred ranks.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the model in place, including subgraphs; the names of outputs are kept."""
        modified = False
        for node in tuple(ir.traversal.RecursiveGraphIterator(model.graph)):
            if _is_transposed_by_vector(node):
                _make_column(node)
                modified = True
        return ir.passes.PassResult(model, modified)


def _is_transposed_by_vector(node: ir.Node) -> bool:
    """True if a node is a MatMul of a Transpose's output and a vector."""
    if node.op_type != "MatMul" or node.domain != "":
        return False
    left, right = node.inputs
    if left is None or right is None or right.shape is None or len(right.shape) != 1:
        return False
    producer = left.producer()
    while producer is not None and producer.op_type == "Cast" and producer.inputs[0] is not None:
        # ONNX Runtime also fuses a Transpose that is followed by a Cast.
        producer = producer.inputs[0].producer()
    return producer is not None and producer.op_type == "Transpose" and producer.domain == ""


def _make_column(node: ir.Node) -> None:
    """Unsqueezes the vector that a MatMul reads to a one-column matrix, and squeezes the product."""
    vector, result = node.inputs[1], node.outputs[0]
    assert vector is not None
    assert vector.shape is not None
    axis = write_before(node, "last_axis", "Constant", value_ints=[-1])
    column = write_before(node, "column", "Unsqueeze", vector, axis)
    column.type, column.shape = vector.type, ir.Shape([*vector.shape, 1])
    node.replace_input_with(1, column)
    # The output vector keeps its name; the product has an additional axis of size 1.
    squeezed = successor(result)
    if result.shape is not None:
        result.shape = ir.Shape([*result.shape, 1])
    node.append(ir.node("Squeeze", [result, axis], outputs=[squeezed]))
