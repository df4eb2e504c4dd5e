"""Write the axes of reductions in the form that all versions of ONNX Runtime read correctly."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.op_facts import REDUCTIONS
from onnxtrain.passes.tidy.constants import known_array
from onnxtrain.passes.tidy.replace_value import write_before
from onnxtrain.passes.tidy.unused import remove_unread_initializers

# Elementwise op that equals a reduction over no axes; Mul gets the input twice.
_OF_ONE_ELEMENT = {
    **dict.fromkeys(
        ("ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"), "Identity"
    ),
    **dict.fromkeys(("ReduceL1", "ReduceL2"), "Abs"),
    "ReduceLogSum": "Log",
    "ReduceSumSquare": "Mul",
    "Squeeze": "Identity",
}


class NoAxesPass(ir.passes.InPlacePass):
    """Rewrite reductions over no axes (`noop_with_empty_axes=1`) as elementwise ops, Squeezes of no axes as Identity.

    ONNX Runtime 1.20 returns the unchanged input of such a reduction, also of ReduceL2 and ReduceLogSum, and fails if
    the axes are omitted; 1.32 does neither. For a Squeeze of empty axes ONNX Runtime (1.20 to 1.32) removes all axes of
    size 1; onnx's reference removes none.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place, in subgraphs too."""
        modified = False
        for node in ir.traversal.RecursiveGraphIterator(model.graph):
            elementwise = _OF_ONE_ELEMENT.get(node.op_type)
            if elementwise is None or node.domain != "" or not _has_no_axes(node):
                continue
            axes = node.inputs[1] if len(node.inputs) > 1 else None
            node.op_type = elementwise
            node.attributes.clear()
            node.resize_inputs(1)
            # ONNX Runtime warns of initializers that nothing reads.
            remove_unread_initializers(model.graph, [axes])
            if elementwise == "Mul":
                node.resize_inputs(2)
                node.replace_input_with(1, node.inputs[0])
            modified = True
        return ir.passes.PassResult(model, modified)


def _has_no_axes(node: ir.Node) -> bool:
    """Tell if a reduction or Squeeze works on no axes."""
    # A Squeeze without axes removes all axes of size 1; a reduction without axes reduces all unless told otherwise.
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    if node.op_type == "Squeeze":
        return axes is not None and _is_empty(axes)
    return bool(node.attributes.get_int("noop_with_empty_axes", 0)) and (axes is None or _is_empty(axes))


def _is_empty(axes: ir.Value) -> bool:
    return axes.shape is not None and list(axes.shape) == [0]


class PositiveAxesPass(ir.passes.InPlacePass):
    """Make constant axes of reductions nonnegative. Expects inferred ranks; nodes of unknown rank stay.

    Up to ONNX Runtime 1.31, a tensor without elements is not reduced over negative axes: the result has the input's
    shape. 1.32 reduces it.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place."""
        modified = False
        for node in ir.traversal.RecursiveGraphIterator(model.graph):
            axes = _negative_axes(node)
            if axes is None:
                continue
            node.replace_input_with(1, write_before(node, "axes", "Constant", value_ints=axes))
            modified = True
        return ir.passes.PassResult(model, modified)


def _negative_axes(node: ir.Node) -> list[int] | None:
    """Return the axes of a reduction, counted from the front, if one of them is counted from the back; else None."""
    if node.op_type not in REDUCTIONS or node.domain != "" or len(node.inputs) < 2:
        return None
    data, axes = node.inputs
    constant_axes = known_array(axes)
    if constant_axes is None or data is None or not data.shape:
        return None
    numbers, rank = constant_axes.ravel().tolist(), data.shape.rank()
    return [axis % rank for axis in numbers] if any(axis < 0 for axis in numbers) else None
