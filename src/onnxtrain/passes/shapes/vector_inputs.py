"""Say of inputs that list a number per axis that they are vectors, where a model declares no shape of them."""

from __future__ import annotations

import onnx_ir as ir


class VectorsPass(ir.passes.InPlacePass):
    """Give the inputs of Slice and Resize that are vectors the shape of one, where they have none.

    Shape inference of onnx (1.23) takes axes and steps of Slice without a shape for ones that are not there, and
    sizes of Resize without a length for none. It has to be done before shapes are inferred, or an opset converted.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Annotate in place."""
        modified = False
        for node in model.graph.all_nodes():
            if node.domain == "" and node.op_type == "Slice":
                vectors = [value for value in node.inputs[1:] if value is not None]
                kind = next(
                    (value.type for value in vectors if value.type is not None), None
                )  # they have one
                for value in vectors if kind is not None else ():  # without a type a shape is not declared
                    if value.shape is None:
                        value.shape, value.type, modified = ir.Shape([None]), kind, True
            elif node.domain == "" and node.op_type == "Resize":
                length = _numbers(node)
                dtypes = (ir.DataType.FLOAT, ir.DataType.INT64)  # of scales and of sizes
                for given, dtype in zip(node.inputs[2:], dtypes, strict=False) if length is not None else ():
                    if given is not None and (given.shape is None or list(given.shape) == [None]):
                        given.shape, given.type, modified = ir.Shape([length]), ir.TensorType(dtype), True
        return ir.passes.PassResult(model, modified)


def _numbers(node: ir.Node) -> int | None:
    """How many scales or sizes a Resize has, if that is known."""
    if "axes" in node.attributes:
        return len(node.attributes["axes"].as_ints())
    image = node.inputs[0]
    return None if image is None or image.shape is None else image.shape.rank()
