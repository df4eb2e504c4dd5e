"""Count the axes of reductions from the front."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["PositiveAxesPass"]


class PositiveAxesPass(ir.passes.InPlacePass):
    """Make the constant axes of reductions nonnegative, where the rank is known.

    Over axes that are counted from the back ONNX Runtime (1.31) does not reduce a tensor without elements: the result
    has the shape of the input.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place."""
        modified = False
        for node in ir.traversal.RecursiveGraphIterator(model.graph):
            axes = _negative_axes(node)
            if axes is None:
                continue
            constant = ir.node("Constant", [], {"value": ir.tensor(axes)})
            assert node.graph is not None
            node.graph.insert_before(node, constant)
            node.replace_input_with(1, constant.outputs[0])
            modified = True
        return ir.passes.PassResult(model, modified)


def _negative_axes(node: ir.Node) -> list[int] | None:
    """Return the axes of a reduction, counted from the front, if one of them is not yet."""
    if not node.op_type.startswith("Reduce") or node.domain != "" or len(node.inputs) < 2:
        return None
    data, axes = node.inputs
    tensor = ir.convenience.get_const_tensor(axes) if axes is not None else None
    if tensor is None or data is None or not data.shape:
        return None
    numbers, rank = tensor.numpy().ravel().tolist(), data.shape.rank()
    return [axis % rank for axis in numbers] if any(axis < 0 for axis in numbers) else None
