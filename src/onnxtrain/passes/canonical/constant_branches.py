"""Take apart the If nodes of which the condition is known when the model is built."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from onnxtrain.passes.tidy.replace_value import stand_in
from onnxtrain.passes.tidy.unused import read_nothing


class TakenBranchPass(ir.passes.InPlacePass):
    """Put the branch that is taken in the place of an If whose condition is a constant, in subgraphs too.

    TorchScript's exporter leaves such an If of every `squeeze` of a dimension that it cannot prove to be 1, and shape
    inference and folding settle its condition. Names of graph outputs stay.
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
    """Return the condition of an If, None where it is not known or the node is none."""
    if node.op_type != "If" or node.domain != "" or node.graph is None or not node.inputs:
        return None
    condition = node.inputs[0]
    if condition is None or condition.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(condition)
    return None if tensor is None or tensor.size != 1 else bool(tensor.numpy().item())


def _replace(model: ir.Model, node: ir.Node, taken: bool) -> None:
    graph = node.graph
    assert graph is not None
    branches = [node.attributes[name].as_graph() for name in ("else_branch", "then_branch")]
    branch, other = branches[taken], branches[not taken]
    read_nothing(other)
    _rename_shared(model, branch)
    for key, value in tuple(branch.initializers.items()):
        branch.initializers.pop(key)
        model.graph.register_initializer(value)
    results = list(branch.outputs)
    branch.outputs.clear()
    moved = list(branch)
    branch.remove(moved)
    graph.insert_before(node, moved)
    for output, result in zip(node.outputs, results, strict=True):
        stand_in(output, result, node)
    graph.remove(node, safe=True)


def _rename_shared(model: ir.Model, branch: ir.Graph) -> None:
    """Give the values of a branch whose names others have too, as those of another branch may, names of their own."""
    names = Counter(
        value.name
        for graph in model.graphs()
        for value in (
            *graph.inputs,
            *graph.initializers.values(),
            *(out for node in graph for out in node.outputs),
        )
    )
    values = [*branch.initializers.values(), *(out for node in branch for out in node.outputs)]
    for value in values:
        if not value.name or names[value.name] < 2:
            continue
        count = 1
        while f"{value.name}_{count}" in names:
            count += 1
        names[value.name] -= 1
        value.name = f"{value.name}_{count}"
        names[value.name] += 1
