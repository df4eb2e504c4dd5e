"""Removes states that a Loop or Scan never changes. The body reads the initial tensor instead."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.parameters.stop_gradient import is_stop_gradient
from onnxtrain.passes.tidy.replace_value import stand_in

_FIRST_STATE = {"Loop": (2, 2, 1), "Scan": (0, 0, 0)}
"""Index of the first state among the inputs of the node, the inputs of the body, and the outputs of the body."""


class LoopInvariantsPass(ir.passes.InPlacePass):
    """Removes states that a Loop or Scan never changes. The body reads the initial value from the outer graph instead.

    The gradient of a loop saves all states before each iteration, and adds up their cotangents over the iterations. For
    an unchanged state with one row per iteration, memory and time would be quadratic in the number of iterations.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites nodes of the main graph and its subgraphs in place."""
        modified = False
        # Inner loops first: a loop may carry a state through an inner loop that doesn't change it.
        for node in reversed(tuple(ir.traversal.RecursiveGraphIterator(model.graph))):
            if node.op_type in _FIRST_STATE and node.domain == "":
                modified |= _rewrite(node)
        return ir.passes.PassResult(model, modified)


def _rewrite(node: ir.Node) -> bool:
    """Removes the unchanged states of a Loop or Scan. Returns False if there are none."""
    body = node.attributes["body"].as_graph()
    of_node, of_input, of_output = _FIRST_STATE[node.op_type]
    scanned = node.attributes.get_int("num_scan_inputs", 0)
    count = len(node.inputs) - of_node - scanned
    unchanged = [
        k
        for k in range(count)
        if node.inputs[of_node + k] is not None
        and _source(body.outputs[of_output + k]) is body.inputs[of_input + k]
    ]
    if not unchanged:
        return False
    kept = [index for index in range(len(node.inputs)) if index - of_node not in unchanged]
    results = [index for index in range(len(node.outputs)) if index not in unchanged]
    states = [(body.inputs[of_input + k], node.inputs[of_node + k]) for k in unchanged]
    for k in reversed(unchanged):
        del body.inputs[of_input + k], body.outputs[of_output + k]
    for before, initial in states:
        _keep_outputs(body, before)
        assert initial is not None
        before.replace_all_uses_with(initial, replace_graph_outputs=True)
    for k in unchanged:
        initial = node.inputs[of_node + k]
        assert initial is not None
        stand_in(node.outputs[k], initial, node)
    if results:
        loop = ir.Node(
            "",
            node.op_type,
            [node.inputs[index] for index in kept],
            node.attributes.values(),
            num_outputs=len(results),
            name=node.name,
            metadata_props=dict(node.metadata_props),
        )
        node.prepend(loop)
        for index, new in zip(results, loop.outputs, strict=True):
            old = node.outputs[index]
            name, old.name = old.name, None
            new.name, new.type, new.shape = name, old.type, old.shape
            old.replace_all_uses_with(new, replace_graph_outputs=True)
    assert node.graph is not None
    node.graph.remove(node, safe=True)
    return True


def _source(value: ir.Value) -> ir.Value:
    """Follows a value back through Identity nodes, except those that stop gradients, and returns the copied value."""
    while True:
        node = value.producer()
        if node is None or node.op_type != "Identity" or node.domain or is_stop_gradient(node):
            return value
        assert node.inputs[0] is not None
        value = node.inputs[0]


def _keep_outputs(body: ir.Graph, value: ir.Value) -> None:
    """Inserts an Identity for each output of `body` that is `value` itself, because a body must compute its outputs."""
    for index, output in enumerate(body.outputs):
        if output is value:
            copy = ir.node("Identity", [value])
            copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
            body.append(copy)
            body.outputs[index] = copy.outputs[0]
