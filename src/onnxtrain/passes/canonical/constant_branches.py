"""Replace an If whose condition is constant by the branch that is taken."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from onnxtrain.passes.tidy.constants import known_array
from onnxtrain.passes.tidy.replace_value import stand_in
from onnxtrain.passes.tidy.unique_names import numbered, values_of
from onnxtrain.passes.tidy.unused import read_nothing


class TakenBranchPass(ir.passes.InPlacePass):
    """Inline the branch that is taken if the condition of an If is a constant, also in subgraphs.

    TorchScript's exporter writes an If for every `squeeze` of a dimension that it cannot prove to be 1; shape inference
    and folding make its condition constant. Expects folded conditions; leaves the names of graph outputs.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place."""
        modified = False
        for node in tuple(ir.traversal.RecursiveGraphIterator(model.graph)):
            taken = _taken(node)
            if taken is not None:
                _replace(model, node, taken)
                modified = True
        return ir.passes.PassResult(model, modified)


def _taken(node: ir.Node) -> bool | None:
    """Return the condition of an If; None if the condition is not constant or the node is no If."""
    if node.op_type != "If" or node.domain != "" or node.graph is None or not node.inputs:
        return None
    condition = known_array(node.inputs[0])
    return None if condition is None or condition.size != 1 else bool(condition.item())


def _replace(model: ir.Model, node: ir.Node, taken: bool) -> None:
    """Move the nodes of one branch of an If to the graph around it, and remove the If."""
    graph = node.graph
    assert graph is not None
    branches = [node.attributes[name].as_graph() for name in ("else_branch", "then_branch")]
    branch, other = branches[taken], branches[not taken]
    # The branch that is dropped counts as a reader of outer values, which would keep them from being cleaned up.
    read_nothing(other)
    _rename_shared(model, branch)
    # The branch may stand in a subgraph; initializers live in the main graph, where all passes look for tensors.
    for key, value in tuple(branch.initializers.items()):
        branch.initializers.pop(key)
        model.graph.register_initializer(value)
    # onnx_ir lets a value be an output of one graph only, and these may become outputs of the outer one.
    results = list(branch.outputs)
    branch.outputs.clear()
    moved = list(branch)
    branch.remove(moved)
    graph.insert_before(node, moved)
    for output, result in zip(node.outputs, results, strict=True):
        stand_in(output, result, node)
    graph.remove(node, safe=True)


def _rename_shared(model: ir.Model, branch: ir.Graph) -> None:
    """Rename values of a branch whose names occur elsewhere: ONNX allows one name in two branches, not in one graph."""
    # Of two values of one name in two branches, the one that is moved first gets a new name and the other keeps it.
    counts = Counter(value.name for graph in model.graphs() for value in values_of(graph))
    taken = set(counts)
    for value in tuple(values_of(branch)):
        if value.name and counts[value.name] > 1:
            counts[value.name] -= 1
            value.name = numbered(value.name, taken)
