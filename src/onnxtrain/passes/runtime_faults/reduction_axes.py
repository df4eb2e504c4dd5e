"""Rewrites the axes of reductions in a form that all versions of ONNX Runtime handle correctly."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.op_facts import REDUCTIONS
from onnxtrain.passes.tidy.constants import known_array
from onnxtrain.passes.tidy.replace_value import write_before
from onnxtrain.passes.tidy.unused import remove_unread_initializers

# Elementwise op that is equivalent to a reduction over no axes; Mul reads the input twice.
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
    """Rewrites reductions over no axes as elementwise ops, and Squeezes of no axes as Identity.

    ONNX Runtime 1.20 returns the input of a reduction with `noop_with_empty_axes=1` unchanged, even for ReduceL2 and
    ReduceLogSum, and fails if the axes are omitted; 1.32 is correct. For a Squeeze with empty axes, ONNX Runtime (1.20
    to 1.32) removes all axes of size 1, whereas onnx's reference implementation removes none.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites nodes of the main graph and its subgraphs in place."""
        modified = False
        for node in ir.traversal.RecursiveGraphIterator(model.graph):
            elementwise = _OF_ONE_ELEMENT.get(node.op_type)
            if elementwise is None or node.domain != "" or not _has_no_axes(node):
                continue
            axes = node.inputs[1] if len(node.inputs) > 1 else None
            node.op_type = elementwise
            node.attributes.clear()
            node.resize_inputs(1)
            # ONNX Runtime warns about unread initializers.
            remove_unread_initializers(model.graph, [axes])
            if elementwise == "Mul":
                node.resize_inputs(2)
                node.replace_input_with(1, node.inputs[0])
            modified = True
        return ir.passes.PassResult(model, modified)


def _has_no_axes(node: ir.Node) -> bool:
    """True if a reduction or Squeeze applies to no axes."""
    # Without this input, a Squeeze removes all axes of size 1, and a reduction reduces all axes by default.
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    if node.op_type == "Squeeze":
        return axes is not None and _is_empty(axes)
    return bool(node.attributes.get_int("noop_with_empty_axes", 0)) and (axes is None or _is_empty(axes))


def _is_empty(axes: ir.Value) -> bool:
    return axes.shape is not None and list(axes.shape) == [0]


class PositiveAxesPass(ir.passes.InPlacePass):
    """Makes constant axes of reductions non-negative. Expects inferred ranks; nodes of unknown rank are not modified.

    Up to 1.31, ONNX Runtime does not reduce an empty tensor over negative axes: the result has the input's shape.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites nodes of the model in place."""
        modified = False
        for node in ir.traversal.RecursiveGraphIterator(model.graph):
            axes = _negative_axes(node)
            if axes is None:
                continue
            node.replace_input_with(1, write_before(node, "axes", "Constant", value_ints=axes))
            modified = True
        return ir.passes.PassResult(model, modified)


def _negative_axes(node: ir.Node) -> list[int] | None:
    """Returns the axes of a reduction as non-negative numbers, or None if none of them is negative."""
    if node.op_type not in REDUCTIONS or node.domain != "" or len(node.inputs) < 2:
        return None
    data, axes = node.inputs
    constant_axes = known_array(axes)
    if constant_axes is None or data is None or not data.shape:
        return None
    numbers, rank = constant_axes.ravel().tolist(), data.shape.rank()
    return [axis % rank for axis in numbers] if any(axis < 0 for axis in numbers) else None
