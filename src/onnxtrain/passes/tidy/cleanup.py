"""Removes redundant nodes and initializers, but keeps parameters and the names of inputs and outputs."""

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

# onnx_ir (1.1) does not annotate the class's __init__, so mypy rejects a direct call.
_RemoveUnusedFunctions: Callable[[], ir.passes.PassBase] = common.RemoveUnusedFunctionsPass
# Larger constants are not compared: that would cost more time than a duplicate costs memory.
_SMALL = 1024


class CleanupPass(ir.passes.InPlacePass):
    """Eliminates identities, duplicate constants, common subexpressions, dead nodes and unused initializers.

    Unused functions and opset imports are removed as well. The graph's inputs and outputs and the initializers in
    `keep` are preserved, even if an initializer is unused or has a duplicate; the pass raises an error if onnx_ir's
    passes have lost one. Random and custom ops are never merged. Identity nodes that stop gradients are kept.
    """

    def __init__(self, keep: Collection[str] | None = None) -> None:
        """Creates the pass.

        Args:
            keep: names of initializers to keep, e.g. {"fc.weight"}. Default: all parameters (`is_float_parameter`).
        """
        super().__init__()
        self._keep = None if keep is None else frozenset(keep)
        self._before: tuple[list[str | None], list[str | None], list[str]] = ([], [], [])

    def requires(self, model: ir.Model) -> None:
        """Stores the names that must be preserved."""
        self._before = (*_interface(model), list(self._kept(model)))

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Cleans up the model in place."""
        kept = self._kept(model)
        # Identities first, because they keep common subexpressions from being found.
        with _nodes_hidden(_needed_identities(model)):
            modified = common.IdentityEliminationPass()(model).modified
        # Parameters are not merged: scales of two layers may start equal but are trained separately.
        with initializers_set_aside(model.graph, kept):
            modified |= common.DeduplicateInitializersPass(size_limit=_SMALL)(model).modified
        with _nodes_hidden(_unmergeable(model)):
            modified |= common.CommonSubexpressionEliminationPass(size_limit=_SMALL)(model).modified
        # onnx_ir's pass below counts subgraphs of removed nodes as readers, and keeps what only they read.
        modified |= remove_unread_nodes(model.graph)
        with initializers_set_aside(model.graph, kept):
            modified |= common.RemoveUnusedNodesPass()(model).modified
        restore_places(model)
        rest = ir.passes.Sequential(_RemoveUnusedFunctions(), common.RemoveUnusedOpsetsPass())
        modified |= rest(model).modified
        return ir.passes.PassResult(model, modified)

    def ensures(self, model: ir.Model) -> None:
        """Raises an error if a name was not preserved."""
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
    """Yields all nodes of a model's graph, its functions and all subgraphs."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        yield from ir.traversal.RecursiveGraphIterator(graph)


def _needed_identities(model: ir.Model) -> list[ir.Node]:
    """Returns the identities that must be kept: they stop gradients, or a graph output needs them for its name."""
    needed = []
    # Values that will be renamed to a graph output; each can take one such name.
    renamed: set[ir.Value] = set()
    for node in _all_nodes(model):
        if node.op_type != "Identity" or node.domain != "":
            continue
        source, result = _origin(node.inputs[0]), node.outputs[0]
        # Also in function bodies. The LSTM's function returns its cell state twice, and ONNX Runtime wrote two outputs
        # with the same name to the same memory, so that gradients varied between runs.
        names_output = result.is_graph_output() and (
            source is None
            or source.is_graph_output()
            # The output of a subgraph must be computed in the subgraph.
            or source.graph is not node.graph
            or source in renamed
        )
        if names_output or is_stop_gradient(node):
            needed.append(node)
        elif result.is_graph_output() and source is not None:
            renamed.add(source)
    return needed


def _origin(value: ir.Value | None) -> ir.Value | None:
    """Returns the value that a chain of Identity nodes copies to `value`; returns `value` itself if there is no chain.

    The chain consists of nodes that may be eliminated: they neither stop gradients nor compute graph outputs.
    """
    # All of them: in a branch, the first of two consecutive identities may copy a value of the enclosing graph.
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
    """Returns the nodes that common subexpression elimination must not merge."""
    return [
        node
        for node in ir.traversal.RecursiveGraphIterator(model.graph)
        # Two Dropouts of the same input draw different masks.
        if _is_random(model, node)
        # Merging it with an ordinary Identity would either lose the stop or stop another path's gradient.
        or is_stop_gradient(node)
        # Consumers of a merged output need the output to exist on the remaining node.
        or not all(output.name for output in node.outputs)
    ]


def _is_random(model: ir.Model, node: ir.Node) -> bool:
    """True if a node may draw random numbers: a random op, a custom op, or a call of a function that contains one."""
    if node.domain == "":
        return node.op_type in RANDOM_OPS
    function = model.functions.get(node.op_identifier())
    # A custom op may do anything.
    if function is None:
        return True
    return any(_is_random(model, inner) for inner in function.all_nodes())


@contextmanager
def _nodes_hidden(nodes: list[ir.Node]) -> Iterator[None]:
    """Context manager that gives each node a unique domain, so that passes of onnx_ir skip it as an unknown op."""
    domains = [node.domain for node in nodes]
    for index, node in enumerate(nodes):
        node.domain = f"onnxtrain.hidden.{index}"
    try:
        yield
    finally:
        for node, domain in zip(nodes, domains, strict=True):
            node.domain = domain
