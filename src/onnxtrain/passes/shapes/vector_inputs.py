"""Declares inputs of Slice and Resize that have one element per axis as vectors."""

from __future__ import annotations

import onnx_ir as ir


class VectorsPass(ir.passes.InPlacePass):
    """Declares the starts, ends, axes and steps of Slice, and the scales and sizes of Resize, as vectors.

    onnx's shape inference (1.23) ignores the axes and steps of a Slice if their shape is unknown, and the sizes of a
    Resize if their number is unknown. Run this pass before shapes are inferred or the opset is converted.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Sets the shapes and dtypes of these inputs in place, including those in subgraphs."""
        modified = False
        for node in model.graph.all_nodes():
            if node.domain == "" and node.op_type == "Slice":
                vectors = [value for value in node.inputs[1:] if value is not None]
                # All have the same dtype. A proto cannot store a shape without a dtype.
                kind = next((value.type for value in vectors if value.type is not None), None)
                for value in vectors if kind is not None else ():
                    if value.shape is None:
                        value.shape, value.type, modified = ir.Shape([None]), kind, True
            elif node.domain == "" and node.op_type == "Resize":
                length = _numbers(node)
                # Dtypes of input 2 (scales) and input 3 (sizes).
                dtypes = (ir.DataType.FLOAT, ir.DataType.INT64)
                for vector, dtype in zip(node.inputs[2:], dtypes, strict=False) if length is not None else ():
                    if vector is not None and (vector.shape is None or list(vector.shape) == [None]):
                        vector.shape, vector.type, modified = ir.Shape([length]), ir.TensorType(dtype), True
        return ir.passes.PassResult(model, modified)


def _numbers(node: ir.Node) -> int | None:
    """Returns the number of scales or sizes of a Resize, or None if this number is unknown."""
    if "axes" in node.attributes:
        return len(node.attributes["axes"].as_ints())
    image = node.inputs[0]
    return None if image is None or image.shape is None else image.shape.rank()
