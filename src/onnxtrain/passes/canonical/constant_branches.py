"""Inlines the taken branch of If nodes whose condition is constant."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from onnxtrain.passes.tidy.constants import known_array
from onnxtrain.passes.tidy.replace_value import stand_in
from onnxtrain.passes.tidy.unique_names import numbered, values_of
from onnxtrain.passes.tidy.unused import read_nothing


class TakenBranchPass(ir.passes.InPlacePass):
    """Inlines the taken branch of each If that has a constant condition, including Ifs in subgraphs.

    TorchScript's exporter writes an If for every `squeeze` of a dimension that it cannot prove to be 1. Shape inference
    and constant folding make the condition constant. Expects folded conditions. Keeps the names of graph outputs.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites nodes of the model in place."""
        modified = False
        for node in tuple(ir.traversal.RecursiveGraphIterator(model.graph)):
            taken = _taken(node)
            if taken is not None:
                _replace(model, node, taken)
                modified = True
        return ir.passes.PassResult(model, modified)


def _taken(node: ir.Node) -> bool | None:
    """Returns the constant condition of an If, or None if the condition is not constant or the node is not an If."""
    if node.op_type != "If" or node.domain != "" or node.graph is None or not node.inputs:
        return None
    condition = known_array(node.inputs[0])
    return None if condition is None or condition.size != 1 else bool(condition.item())


def _replace(model: ir.Model, node: ir.Node, taken: bool) -> None:
    """Moves the nodes of one branch of an If into the enclosing graph, and removes the If."""
    graph = node.graph
    assert graph is not None
    branches = [node.attributes[name].as_graph() for name in ("else_branch", "then_branch")]
    branch, other = branches[taken], branches[not taken]
    # Nodes of the dropped branch would still count as users of outer values, and keep these from being removed.
    read_nothing(other)
    _rename_shared(model, branch)
    # Passes look for initializers in the main graph only, even if the If is in a subgraph.
    for key, value in tuple(branch.initializers.items()):
        branch.initializers.pop(key)
        model.graph.register_initializer(value)
    # In onnx_ir a value can be an output of one graph only, and these may become outputs of the enclosing graph.
    results = list(branch.outputs)
    branch.outputs.clear()
    moved = list(branch)
    branch.remove(moved)
    graph.insert_before(node, moved)
    for output, result in zip(node.outputs, results, strict=True):
        stand_in(output, result, node)
    graph.remove(node, safe=True)


def _rename_shared(model: ir.Model, branch: ir.Graph) -> None:
    """Renames the branch's values whose names are also used elsewhere in the model, e.g. by the other branch."""
    # If both branches have a value of this name, the branch that is moved first is renamed.
    counts = Counter(value.name for graph in model.graphs() for value in values_of(graph))
    taken = set(counts)
    for value in tuple(values_of(branch)):
        if value.name and counts[value.name] > 1:
            counts[value.name] -= 1
            value.name = numbered(value.name, taken)
