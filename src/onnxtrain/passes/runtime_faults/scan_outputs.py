"""Copy what the body of a Scan returns of its inputs."""

from __future__ import annotations

import onnx_ir as ir


class ScanOutputsPass(ir.passes.InPlacePass):
    """Put an Identity between an input of a Scan's body and the output that is this input.

    ONNX Runtime (1.32) leaves such an output unset: a state that every iteration passes on as it is, and a scan
    output that repeats a state or the rows that are scanned, hold whatever was in their memory before. It happens with
    all graph optimizers switched off, too, and none of them removes the Identity. A Loop has no such fault.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place, also in subgraphs and functions; values keep their names."""
        modified = False
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            for node in ir.traversal.RecursiveGraphIterator(graph):
                if (node.domain, node.op_type) == ("", "Scan"):
                    modified |= _copy_inputs(node.attributes["body"].as_graph())
        return ir.passes.PassResult(model, modified)


def _copy_inputs(body: ir.Graph) -> bool:
    """Replace each output of a body that is one of its inputs by a copy; return whether there was one."""
    inputs = {id(value) for value in body.inputs}
    places = [place for place, value in enumerate(body.outputs) if id(value) in inputs]
    for place in places:
        value = body.outputs[place]
        copy = ir.node("Identity", [value])
        result = copy.outputs[0]
        # Outputs of a body are found by their place, so that the name is free; it must differ from all others.
        result.name = f"{value.name}_output{place}"
        result.type, result.shape = value.type, value.shape
        body.append(copy)
        body.outputs[place] = result
    return bool(places)
