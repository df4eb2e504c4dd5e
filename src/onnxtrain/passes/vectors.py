"""Say of inputs that list a number per axis that they are vectors, where a model declares no shape of them."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["VectorsPass"]


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
                starts = node.inputs[1] if len(node.inputs) > 1 else None
                for value in node.inputs[1:]:
                    if value is not None and value.shape is None:
                        value.shape, modified = ir.Shape([None]), True
                        if value.type is None and starts is not None:
                            value.type = starts.type  # they have one; without it a shape is not declared
            elif node.domain == "" and node.op_type == "Resize":
                length = _numbers(node)
                for value in node.inputs[2:] if length is not None else ():
                    if value is not None and (value.shape is None or list(value.shape) == [None]):
                        value.shape, modified = ir.Shape([length]), True
        return ir.passes.PassResult(model, modified)


def _numbers(node: ir.Node) -> int | None:
    """How many scales or sizes a Resize has, if that is known."""
    if "axes" in node.attributes:
        return len(node.attributes["axes"].as_ints())
    image = node.inputs[0]
    return None if image is None or image.shape is None else image.shape.rank()
