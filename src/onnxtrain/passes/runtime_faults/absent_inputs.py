"""Removes trailing absent optional inputs, such as the last one of `LayerNormalization(x, scale, "")`."""

from __future__ import annotations

import functools

import onnx
import onnx_ir as ir


class AbsentInputsPass(ir.passes.InPlacePass):
    """Removes trailing absent optional inputs of all nodes in the main graph, subgraphs and functions.

    `LayerNormalization(x, scale, "")` becomes the equivalent `LayerNormalization(x, scale)`. ONNX Runtime (1.20 to
    1.32) aborts the process when it loads the former at optimization level extended or higher. In 6,000 random graphs
    with absent inputs in all positions, only LayerNormalization caused this; 22,000 graphs without trailing absent
    inputs all loaded.

    An absent input is kept if the op's schema requires that many inputs: onnx (1.23), for example, fails on a Loop
    whose absent condition has been removed. Calls of model-local functions are not modified.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Removes the inputs in place."""
        modified = False
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            for node in ir.traversal.RecursiveGraphIterator(graph):
                # A call binds inputs to the function's parameters by position.
                if node.op_identifier() in model.functions:
                    continue
                count = _needed(node)
                if count < len(node.inputs):
                    node.resize_inputs(count)
                    modified = True
        return ir.passes.PassResult(model, modified)


def restore_places(model: ir.Model) -> None:
    """Appends absent inputs to nodes with fewer inputs than their op requires, in place.

    RemoveUnusedNodesPass of onnx_ir (1.1) removes all trailing absent inputs. A Loop without states is left with one
    input, on which the shape inference of onnx (1.23) fails.
    """
    for node in model.graph.all_nodes():
        least = _least(node.op_type, node.domain)
        if len(node.inputs) < least:
            node.resize_inputs(least)


def _needed(node: ir.Node) -> int:
    """Returns the length to which the input list of `node` can be shortened."""
    # Inputs are found by position, so an absent input between others is kept.
    present = (index for index in reversed(range(len(node.inputs))) if node.inputs[index] is not None)
    last = next(present, -1) + 1
    if last == len(node.inputs):
        return last
    return max(last, min(_least(node.op_type, node.domain), len(node.inputs)))


@functools.cache
def _least(op_type: str, domain: str) -> int:
    """Returns the minimum number of inputs in the op's schema, e.g. 2 for Loop, or 0 for a nonstandard op."""
    try:
        return int(onnx.defs.get_schema(op_type, domain=domain).min_input)
    except onnx.defs.SchemaError:
        return 0
