"""Leave broadcasting to the ops that do it themselves."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.op_facts import ARITHMETIC


class ImplicitExpandPass(ir.passes.InPlacePass):
    """Let elementwise ops read what an Expand would repeat, where their other operand has its whole shape.

    The gradient of a mean is its cotangent, repeated; most often that is multiplied by something of the same shape
    next. What is expanded and then multiplied by one number is multiplied first.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place, outside of subgraphs, which may be run without what lies around them.

        An Expand that nothing reads any more is left.
        """
        modified = False
        for node in tuple(model.graph):
            if (node.op_type, node.domain) == ("Expand", ""):
                modified |= _leave_to_readers(node)
        return ir.passes.PassResult(model, modified)


def _leave_to_readers(expand: ir.Node) -> bool:
    """Makes the readers of an Expand that can do without it read its input; returns whether there were any."""
    small, large = expand.inputs[0], expand.outputs[0]
    if small is None or small.shape is None or large.shape is None:
        return False
    modified = False
    for use in tuple(large.uses()):
        reader, other = use.node, None
        if reader.op_type in ARITHMETIC and reader.domain == "" and reader.graph is expand.graph:
            other = reader.inputs[1 - use.idx]
        if other is None or other is large or other.shape is None:
            continue
        if _same(other.shape, large.shape):
            reader.replace_input_with(use.idx, small)
            modified = True
        elif _is_one_number(other) and not reader.outputs[0].is_graph_output():
            _expand_afterwards(expand, reader, use.idx)
            modified = True
    return modified


def _same(first: ir.Shape, second: ir.Shape) -> bool:
    """Whether two shapes are known to be the same."""
    return first == second and all(isinstance(dim, int) or dim.value is not None for dim in first)


def _is_one_number(value: ir.Value) -> bool:
    return value.shape is not None and value.shape.rank() == 0


def _expand_afterwards(expand: ir.Node, reader: ir.Node, index: int) -> None:
    """Makes a reader, whose other operand is one number, compute before the Expand."""
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
    _leave_to_readers(again)
