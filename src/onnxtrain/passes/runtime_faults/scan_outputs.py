"""Copies inputs of a Scan's body that the body returns unchanged."""

from __future__ import annotations

import onnx_ir as ir


class ScanOutputsPass(ir.passes.InPlacePass):
    """Inserts an Identity where an output of a Scan's body is also an input of the body.

    ONNX Runtime (1.20 to 1.32) does not write such an output, so it contains uninitialized memory. Examples are a
    state that every iteration returns unchanged, and a scan output that repeats a state or the scanned rows. The fault
    does not depend on graph optimizers, and none of them removes the Identity.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the model in place, including subgraphs and functions; values keep their names."""
        modified = False
        # Loop does not have this fault.
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            for node in ir.traversal.RecursiveGraphIterator(graph):
                if (node.domain, node.op_type) == ("", "Scan"):
                    modified |= _copy_inputs(node.attributes["body"].as_graph())
        return ir.passes.PassResult(model, modified)


def _copy_inputs(body: ir.Graph) -> bool:
    """Replaces outputs of a body that are inputs of the body with copies. Returns True if there were any."""
    inputs = {id(value) for value in body.inputs}
    places = [place for place, value in enumerate(body.outputs) if id(value) in inputs]
    for place in places:
        value = body.outputs[place]
        copy = ir.node("Identity", [value])
        result = copy.outputs[0]
        # A Scan finds the outputs of its body by position, so their names may change.
        result.name = f"{value.name}_output{place}"
        result.type, result.shape = value.type, value.shape
        body.append(copy)
        body.outputs[place] = result
    return bool(places)
