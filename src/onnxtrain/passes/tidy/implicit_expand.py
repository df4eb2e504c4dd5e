"""Removes Expands before elementwise ops, which broadcast implicitly."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.op_facts import ARITHMETIC, RESHAPES
from onnxtrain.passes.shapes.dims import same_size


class ImplicitExpandPass(ir.passes.InPlacePass):
    """Makes an elementwise op read the input of an Expand if the op broadcasts it to the same result.

    The gradient of a mean expands its cotangent, and usually the next op multiplies the result by a tensor of the same
    shape: Mul(Expand(ct, shape), x) becomes Mul(ct, x). An op whose other operand is a scalar is moved before the
    Expand.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place; the caller removes Expands that are no longer read."""
        # Not in subgraphs: a subgraph may be copied and run without the enclosing graph.
        modified = False
        for node in tuple(model.graph):
            if (node.op_type, node.domain) == ("Expand", ""):
                modified |= _broadcast_in_readers(node)
        return ir.passes.PassResult(model, modified)


def _broadcast_in_readers(expand: ir.Node) -> bool:
    """Bypasses an Expand in the elementwise ops that read it, because they broadcast implicitly.

    An op whose other operands have the expanded sizes reads the input of the Expand instead. An op whose other operand
    is a scalar is moved before the Expand, unless the op computes a graph output.

    Returns:
        True if an op was modified.
    """
    small, large = expand.inputs[0], expand.outputs[0]
    if small is None or small.shape is None or large.shape is None:
        return False
    modified = _bypass(expand, small, large)
    for use in tuple(large.uses()):
        reader = use.node
        if reader.op_type not in ARITHMETIC or reader.domain != "" or reader.graph is not expand.graph:
            continue
        other = reader.inputs[1 - use.idx]
        if (
            other is not None
            and other.shape is not None
            and other.shape.rank() == 0
            and not reader.outputs[0].is_graph_output()
        ):
            _expand_afterwards(expand, reader, use.idx)
            modified = True
    return modified


def _bypass(expand: ir.Node, small: ir.Value, large: ir.Value) -> bool:
    """Replaces `large`, which repeats the elements of `small`, in the ops that broadcast `small` to the same result.

    Args:
        expand: the Expand.
        small: its input.
        large: its output, or a value with the same elements in another shape if `small` is a number.

    Returns:
        True if an op was modified.
    """
    assert small.shape is not None
    modified = False
    for use in tuple(large.uses()):
        reader = use.node
        if reader.domain != "" or reader.graph is not expand.graph:
            continue
        # A number is the same in every shape.
        if small.shape.rank() == 0 and reader.op_type in RESHAPES and use.idx == 0:
            modified |= _bypass(expand, small, reader.outputs[0])
        elif reader.op_type in ARITHMETIC or reader.op_type == "Where":
            # An op that reads the Expand twice, e.g. to square it, has no other operand with the expanded shape.
            others = [value.shape for value in reader.inputs if value is not None and value is not large]
            shapes = [small.shape, *(shape for shape in others if shape is not None)]
            results = [value.shape for value in (large, reader.outputs[0]) if value.shape is not None]
            if any(_broadcast_to(shapes, result) for result in results):
                reader.replace_input_with(use.idx, small)
                modified = True
    return modified


def _broadcast_to(shapes: Sequence[ir.Shape], result: ir.Shape) -> bool:
    """True if each axis of `result` provably has its size in one of the shapes, so that they broadcast to it."""
    return all(
        any(axis < len(shape) and same_size(shape[-1 - axis], result[-1 - axis]) for shape in shapes)
        for axis in range(len(result))
    )


def _expand_afterwards(expand: ir.Node, reader: ir.Node, index: int) -> None:
    """Swaps an Expand and its reader, whose other operand is a scalar: Mul(Expand(x), 2) to Expand(Mul(x, 2))."""
    small, result = expand.inputs[0], reader.outputs[0]
    assert small is not None
    assert small.shape is not None
    again = ir.node("Expand", [result, expand.inputs[1]])
    again.outputs[0].shape, again.outputs[0].type = result.shape, result.type
    result.replace_all_uses_with(again.outputs[0])
    again.replace_input_with(0, result)
    reader.replace_input_with(index, small)
    result.shape = ir.Shape(small.shape)
    reader.append(again)
    # The readers of the swapped op may broadcast as well.
    _broadcast_in_readers(again)
