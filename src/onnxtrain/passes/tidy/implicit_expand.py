"""Removes Expands before elementwise ops, which broadcast implicitly."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.op_facts import ARITHMETIC


class ImplicitExpandPass(ir.passes.InPlacePass):
    """Makes an elementwise op read the input of an Expand if the op broadcasts it to the same shape.

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

    An op that broadcasts it to the same shape reads the input of the Expand instead. An op whose other operand is
    a scalar is moved before the Expand, unless the op computes a graph output.

    Returns:
        True if an op was modified.
    """
    small, large = expand.inputs[0], expand.outputs[0]
    if small is None or small.shape is None or large.shape is None:
        return False
    modified = False
    for use in tuple(large.uses()):
        reader, other = use.node, None
        if reader.op_type in ARITHMETIC and reader.domain == "" and reader.graph is expand.graph:
            other = reader.inputs[1 - use.idx]
        # An op that reads the Expand twice, e.g. to square it, has no other operand with the expanded shape.
        if other is None or other is large or other.shape is None:
            continue
        if _broadcast_to(large.shape, small.shape, other.shape):
            reader.replace_input_with(use.idx, small)
            modified = True
        elif other.shape.rank() == 0 and not reader.outputs[0].is_graph_output():
            _expand_afterwards(expand, reader, use.idx)
            modified = True
    return modified


def _broadcast_to(shape: ir.Shape, *parts: ir.Shape) -> bool:
    """True if the shapes `parts` provably broadcast to `shape`: each size is that of one of them."""
    rank = shape.rank()
    return all(part.rank() <= rank for part in parts) and all(
        size == 1 or any(_same(part[axis - rank], size) for part in parts if part.rank() >= rank - axis)
        for axis, size in enumerate(shape)
    )


def _same(first: int | ir.SymbolicDim, second: int | ir.SymbolicDim) -> bool:
    """True if two sizes are provably equal: numbers, or symbols with the same name."""
    # Symbols without a name compare equal but may differ in size.
    return first == second and (isinstance(first, int) or first.value is not None)


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
