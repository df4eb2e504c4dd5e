"""Copy inputs of a Scan's body that the body returns unchanged."""

from __future__ import annotations

import onnx_ir as ir


class ScanOutputsPass(ir.passes.InPlacePass):
    """Put an Identity between an input of a Scan's body and an output of the body that is this input.

    ONNX Runtime (1.20 to 1.32) leaves such an output unset: it holds whatever was in its memory before. Examples are a
    state that every iteration passes on unchanged, and a scan output that repeats a state or the scanned rows. Graph
    optimizers do not matter: the fault is there with all of them switched off, and none removes the Identity.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place, also in subgraphs and functions; values keep their names."""
        modified = False
        # A Loop has no such fault, so its bodies stay as they are.
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            for node in ir.traversal.RecursiveGraphIterator(graph):
                if (node.domain, node.op_type) == ("", "Scan"):
                    modified |= _copy_inputs(node.attributes["body"].as_graph())
        return ir.passes.PassResult(model, modified)


def _copy_inputs(body: ir.Graph) -> bool:
    """Replace outputs of a body that are inputs of the body by copies; return whether there are any."""
    inputs = {id(value) for value in body.inputs}
    places = [place for place, value in enumerate(body.outputs) if id(value) in inputs]
    for place in places:
        value = body.outputs[place]
        copy = ir.node("Identity", [value])
        result = copy.outputs[0]
        # A Scan finds the outputs of its body by position, so the output may change its name.
        result.name = f"{value.name}_output{place}"
        result.type, result.shape = value.type, value.shape
        body.append(copy)
        body.outputs[place] = result
    return bool(places)
