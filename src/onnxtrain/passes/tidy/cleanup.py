"""Remove redundant nodes and initializers, but no parameter and no name that the caller knows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import onnx_ir as ir
from onnx_ir.passes import common

from onnxtrain.op_facts import RANDOM_OPS
from onnxtrain.passes.parameters.stop_gradient import is_stop_gradient
from onnxtrain.passes.runtime_faults.absent_inputs import restore_places
from onnxtrain.passes.tidy.constants import initializers_set_aside, is_float_parameter
from onnxtrain.passes.tidy.unused import remove_unread_nodes

# onnx_ir (1.1) leaves the class's __init__ without types, which mypy refuses to call.
_RemoveUnusedFunctions: Callable[[], ir.passes.PassBase] = common.RemoveUnusedFunctionsPass
# Larger constants are left as they are: comparing them costs more time than a second copy costs memory.
_SMALL = 1024


class CleanupPass(ir.passes.InPlacePass):
    """Eliminate identities, duplicate constants, common subexpressions, dead nodes and unused initializers.

    The pass runs passes of onnx_ir, and checks that the names of graph inputs and outputs and the initializers in
    `keep` are still there, be they unused or equal to others. Random ops are never merged. An Identity that stops
    gradients stays.
    """

    def __init__(self, keep: Collection[str] | None = None) -> None:
        """Choose the initializers to leave alone.

        Args:
            keep: Names of initializers, e.g. {"fc.weight"}; None keeps all parameters (`is_float_parameter`).
        """
        super().__init__()
        self._keep = None if keep is None else frozenset(keep)
        self._before: tuple[list[str | None], list[str | None], list[str]] = ([], [], [])

    def requires(self, model: ir.Model) -> None:
        """Note the names that must stay."""
        self._before = (*_interface(model), list(self._kept(model)))

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Clean up in place."""
        kept = self._kept(model)
        # Identities go first: behind one, equal subexpressions do not look equal.
        with _nodes_hidden(_needed_identities(model)):
            modified = common.IdentityEliminationPass()(model).modified
        # Two layers' fresh scales of ones are equal but are trained apart, so parameters are not deduplicated.
        with initializers_set_aside(model.graph, kept):
            modified |= common.DeduplicateInitializersPass(size_limit=_SMALL)(model).modified
        with _nodes_hidden(_unmergeable(model)):
            modified |= common.CommonSubexpressionEliminationPass(size_limit=_SMALL)(model).modified
        # onnx_ir's pass, which follows, counts subgraphs of removed nodes as readers and keeps what only they read.
        modified |= remove_unread_nodes(model.graph)
        with initializers_set_aside(model.graph, kept):
            modified |= common.RemoveUnusedNodesPass()(model).modified
        restore_places(model)
        rest = ir.passes.Sequential(_RemoveUnusedFunctions(), common.RemoveUnusedOpsetsPass())
        modified |= rest(model).modified
        return ir.passes.PassResult(model, modified)

    def ensures(self, model: ir.Model) -> None:
        """Check that the names that must stay are there."""
        inputs, outputs, kept = self._before
        if (inputs, outputs) != _interface(model):
            raise ir.passes.PostconditionError(
                f"cleanup changed the graph's interface from {(inputs, outputs)} to {_interface(model)}"
            )
        lost = [name for name in kept if name not in model.graph.initializers]
        if lost:
            raise ir.passes.PostconditionError(f"cleanup lost the initializers {lost}")

    def _kept(self, model: ir.Model) -> dict[str, ir.Value]:
        return {
            name: value
            for name, value in model.graph.initializers.items()
            if (name in self._keep if self._keep is not None else is_float_parameter(value))
        }


def _interface(model: ir.Model) -> tuple[list[str | None], list[str | None]]:
    return [value.name for value in model.graph.inputs], [value.name for value in model.graph.outputs]


def _all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Yield all nodes of a model, also of subgraphs and functions."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        yield from ir.traversal.RecursiveGraphIterator(graph)


def _needed_identities(model: ir.Model) -> list[ir.Node]:
    """Return identities that must stay: those that stop gradients or give a value a second output name."""
    needed = []
    # Values that take over the name of a graph output, one each.
    renamed: set[ir.Value] = set()
    for node in _all_nodes(model):
        if node.op_type != "Identity" or node.domain != "":
            continue
        source, result = _origin(node.inputs[0]), node.outputs[0]
        # In bodies of functions, too. The LSTM's function returns its cell state twice, and ONNX Runtime wrote two
        # outputs of one name to one place: gradients changed from run to run.
        names_output = result.is_graph_output() and (
            source is None
            or source.is_graph_output()
            # The output of a subgraph must be computed inside of the subgraph.
            or source.graph is not node.graph
            or source in renamed
        )
        if names_output or is_stop_gradient(node):
            needed.append(node)
        elif result.is_graph_output() and source is not None:
            renamed.add(source)
    return needed


def _origin(value: ir.Value | None) -> ir.Value | None:
    """Follow identities that will be eliminated back to the value that they copy."""
    # All at once: of two identities in a row in a branch, the source of the second may be a value around the branch.
    node = value.producer() if value is not None else None
    while (
        node is not None and node.op_type == "Identity" and node.domain == "" and not is_stop_gradient(node)
    ):
        if value is None or value.is_graph_output():
            break
        value = node.inputs[0]
        node = value.producer() if value is not None else None
    return value


def _unmergeable(model: ir.Model) -> list[ir.Node]:
    """Return the nodes that common subexpression elimination must not touch."""
    return [
        node
        for node in ir.traversal.RecursiveGraphIterator(model.graph)
        # Two Dropouts of one input draw two masks.
        if _is_random(model, node)
        # Merged with the plain Identity of a forward path, the stop would be lost or the path cut.
        or is_stop_gradient(node)
        # Merging onto a node that lacks an output would connect its consumers to nothing.
        or not all(output.name for output in node.outputs)
    ]


def _is_random(model: ir.Model, node: ir.Node) -> bool:
    """Tell if a node may draw random numbers; a call does if its function has such a node."""
    if node.domain == "":
        return node.op_type in RANDOM_OPS
    function = model.functions.get(node.op_identifier())
    # A custom op may do anything.
    if function is None:
        return True
    return any(_is_random(model, inner) for inner in function.all_nodes())


@contextmanager
def _nodes_hidden(nodes: list[ir.Node]) -> Iterator[None]:
    """Give each node a domain of its own for the length of a `with` block.

    Passes of onnx_ir then take it for an unknown op and leave it alone.
    """
    domains = [node.domain for node in nodes]
    for index, node in enumerate(nodes):
        node.domain = f"onnxtrain.hidden.{index}"
    try:
        yield
    finally:
        for node, domain in zip(nodes, domains, strict=True):
            node.domain = domain
